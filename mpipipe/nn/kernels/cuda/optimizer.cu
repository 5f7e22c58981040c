// Updates of n parameters in place. Compiled for T, float or double; H, the dtype of a copy of the parameters, or T where
// there is none; and V, elements of one word of memory. Every fused operation is written down:
// left to the compiler, it differs between one element and a word of them, and with it the bits of a share of the whole.
struct state { pack<T, V> p, g, m, v; };

// Take the factor of the gradients from the memory of the device, where it is there, in place of g_scale; and tell whether
// there is a step to be made: NaN stands for none.
__device__ __forceinline__ bool take_factor(const double* factor, T& g_scale) {
    if (factor == nullptr) return true;
    const double value = *factor;
    g_scale = (T)value;
    return value == value;
}

__device__ __forceinline__ void store_copy(H* copy, long long at, const pack<T, V>& p) {
    if (copy == nullptr) return;
    pack<H, V> out;
#pragma unroll
    for (int k = 0; k < V; ++k) out.at[k] = narrow<H>(p.at[k]);
    store(copy + at, out);
}

// g times g_scale; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = shrink p - step m / (sqrt(v) root + eps).
struct Adam {
    T b1, rest1, b2, rest2, eps, step, root, g_scale;
    __device__ __forceinline__ void operator()(T& p, T g, T& m, T& v, T shrink) const {
        g *= g_scale;
        m = fma(b1, m, rest1 * g);
        v = fma(b2, v, rest2 * (g * g));
        p = fma(shrink, p, -(step * (m / fma(sqrt(v), root, eps))));
    }
};

// Moves 7 T a parameter, and 1 H with a copy.
extern "C" __global__ void __launch_bounds__(256)
    adamw(T* p, const T* g, T* m, T* v, H* copy, const double* factor, long long n, T b1, T rest1, T b2,
          T rest2, T eps, T step, T root, T shrink, T g_scale) {
    if (!take_factor(factor, g_scale)) return;
    const Adam update{b1, rest1, b2, rest2, eps, step, root, g_scale};
    each<1>(n / V,
            [&](long long i) {
                return state{load<V>(p + i * V), load<V>(g + i * V), load<V>(m + i * V), load<V>(v + i * V)};
            },
            [&](long long i, state now) {
#pragma unroll
                for (int k = 0; k < V; ++k) update(now.p.at[k], now.g.at[k], now.m.at[k], now.v.at[k], shrink);
                store(p + i * V, now.p);
                store(m + i * V, now.m);
                store(v + i * V, now.v);
                store_copy(copy, i * V, now.p);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return g[rest + i]; },
            [&](long long i, T now) {
                const long long at = rest + i;
                update(p[at], now, m[at], v[at], shrink);
                if (copy != nullptr) copy[at] = narrow<H>(p[at]);
            });
}

// p -= rate (g_scale g + decay p). Moves 3 T a parameter, and 1 H with a copy.
extern "C" __global__ void __launch_bounds__(256)
    sgd(T* p, const T* g, H* copy, const double* factor, long long n, T decay, T rate, T g_scale) {
    if (!take_factor(factor, g_scale)) return;
    auto update = [=](T& p, T g, T decay) { p = fma(-rate, fma(g_scale, g, decay * p), p); };
    each<2>(n / V, [&](long long i) { return pack<pack<T, V>, 2>{load<V>(p + i * V), load<V>(g + i * V)}; },
            [&](long long i, pack<pack<T, V>, 2> now) {
#pragma unroll
                for (int k = 0; k < V; ++k) update(now.at[0].at[k], now.at[1].at[k], decay);
                store(p + i * V, now.at[0]);
                store_copy(copy, i * V, now.at[0]);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return g[rest + i]; },
            [&](long long i, T now) {
                const long long at = rest + i;
                update(p[at], now, decay);
                if (copy != nullptr) copy[at] = narrow<H>(p[at]);
            });
}

// u = momentum u + g_scale g + decay p; p -= rate u. Moves 5 T a parameter, and 1 H with a copy.
extern "C" __global__ void __launch_bounds__(256)
    sgd_momentum(T* p, const T* g, T* u, H* copy, const double* factor, long long n, T momentum, T decay, T rate,
                 T g_scale) {
    if (!take_factor(factor, g_scale)) return;
    auto update = [=](T& p, T g, T& u, T decay) {
        u = fma(momentum, u, fma(g_scale, g, decay * p));
        p = fma(-rate, u, p);
    };
    each<1>(n / V, [&](long long i) { return state{load<V>(p + i * V), load<V>(g + i * V), load<V>(u + i * V)}; },
            [&](long long i, state now) {
#pragma unroll
                for (int k = 0; k < V; ++k) update(now.p.at[k], now.g.at[k], now.m.at[k], decay);
                store(p + i * V, now.p);
                store(u + i * V, now.m);
                store_copy(copy, i * V, now.p);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return g[rest + i]; },
            [&](long long i, T now) {
                const long long at = rest + i;
                update(p[at], now, u[at], decay);
                if (copy != nullptr) copy[at] = narrow<H>(p[at]);
            });
}
