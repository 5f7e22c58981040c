// Updates of n parameters in place. Compiled for T, float or double, and V, elements of one word of memory.
struct state { pack<T, V> p, g, m, v; };

// g times g_scale; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = shrink p - step m / (sqrt(v) root + eps).
struct Adam {
    T b1, rest1, b2, rest2, eps, step, root, shrink, g_scale;
    __device__ __forceinline__ void operator()(T& p, T g, T& m, T& v) const {
        g *= g_scale;
        m = b1 * m + rest1 * g;
        v = b2 * v + rest2 * (g * g);
        p = shrink * p - step * (m / (sqrt(v) * root + eps));
    }
};

// Moves 7 T a parameter.
extern "C" __global__ void __launch_bounds__(256)
    adamw(T* p, const T* g, T* m, T* v, long long n, T b1, T rest1, T b2, T rest2, T eps, T step, T root, T shrink,
          T g_scale) {
    const Adam update{b1, rest1, b2, rest2, eps, step, root, shrink, g_scale};
    each<1>(n / V,
            [&](long long i) {
                return state{load<V>(p + i * V), load<V>(g + i * V), load<V>(m + i * V), load<V>(v + i * V)};
            },
            [&](long long i, state now) {
#pragma unroll
                for (int k = 0; k < V; ++k) update(now.p.at[k], now.g.at[k], now.m.at[k], now.v.at[k]);
                store(p + i * V, now.p);
                store(m + i * V, now.m);
                store(v + i * V, now.v);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return g[rest + i]; },
            [&](long long i, T now) { update(p[rest + i], now, m[rest + i], v[rest + i]); });
}

// p -= rate (g_scale g + decay p). Moves 3 T a parameter.
extern "C" __global__ void __launch_bounds__(256) sgd(T* p, const T* g, long long n, T decay, T rate, T g_scale) {
    auto update = [=](T& p, T g) { p -= rate * (g_scale * g + decay * p); };
    each<2>(n / V, [&](long long i) { return pack<pack<T, V>, 2>{load<V>(p + i * V), load<V>(g + i * V)}; },
            [&](long long i, pack<pack<T, V>, 2> now) {
#pragma unroll
                for (int k = 0; k < V; ++k) update(now.at[0].at[k], now.at[1].at[k]);
                store(p + i * V, now.at[0]);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return g[rest + i]; }, [&](long long i, T now) { update(p[rest + i], now); });
}

// u = momentum u + g_scale g + decay p; p -= rate u. Moves 5 T a parameter.
extern "C" __global__ void __launch_bounds__(256)
    sgd_momentum(T* p, const T* g, T* u, long long n, T momentum, T decay, T rate, T g_scale) {
    auto update = [=](T& p, T g, T& u) {
        u = momentum * u + (g_scale * g + decay * p);
        p -= rate * u;
    };
    each<1>(n / V, [&](long long i) { return state{load<V>(p + i * V), load<V>(g + i * V), load<V>(u + i * V)}; },
            [&](long long i, state now) {
#pragma unroll
                for (int k = 0; k < V; ++k) update(now.p.at[k], now.g.at[k], now.m.at[k]);
                store(p + i * V, now.p);
                store(u + i * V, now.m);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return g[rest + i]; },
            [&](long long i, T now) { update(p[rest + i], now, u[rest + i]); });
}
