// Functions of one or two elements, over n of them. Compiled for T, the dtype, and V, elements of one word of memory.
typedef accumulator<T>::type A;

// y = f(x); y may be x.
template <typename F> __device__ __forceinline__ void map(const T* x, T* y, long long n, F f) {
    each<2>(n / V, [&](long long i) { return load<V>(x + i * V); },
            [&](long long i, const pack<T, V>& in) {
                pack<T, V> out;
#pragma unroll
                for (int k = 0; k < V; ++k) out.at[k] = narrow<T>(f(widen(in.at[k])));
                store(y + i * V, out);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return x[rest + i]; },
            [&](long long i, T in) { y[rest + i] = narrow<T>(f(widen(in))); });
}

template <typename X> struct operands { X x, y; };

// z = f(x, y); z may be x or y.
template <typename F> __device__ __forceinline__ void map(const T* x, const T* y, T* z, long long n, F f) {
    each<2>(n / V, [&](long long i) { return operands<pack<T, V>>{load<V>(x + i * V), load<V>(y + i * V)}; },
            [&](long long i, const operands<pack<T, V>>& in) {
                pack<T, V> out;
#pragma unroll
                for (int k = 0; k < V; ++k) out.at[k] = narrow<T>(f(widen(in.x.at[k]), widen(in.y.at[k])));
                store(z + i * V, out);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return operands<T>{x[rest + i], y[rest + i]}; },
            [&](long long i, const operands<T>& in) { z[rest + i] = narrow<T>(f(widen(in.x), widen(in.y))); });
}

// z = x + y. Moves 3 T an element.
extern "C" __global__ void __launch_bounds__(256) add(const T* x, const T* y, T* z, long long n) {
    map(x, y, z, n, [](A a, A b) { return a + b; });
}

// y = x factor. Moves 2 T an element.
extern "C" __global__ void __launch_bounds__(256) scale(const T* x, T* y, long long n, A factor) {
    map(x, y, n, [=](A a) { return a * factor; });
}

constexpr A ROOT = 0.79788456080286535588, CUBE = 0.044715;  // sqrt(2 / pi)

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ A gate_of(A x) {
    return ratio<T>(A(1), A(1) + exponential<T>(A(-2) * x * (ROOT + ROOT * CUBE * (x * x))));
}

// y = x (1 + tanh(u)) / 2. Moves 2 T an element.
extern "C" __global__ void __launch_bounds__(256) gelu(const T* x, T* y, long long n) {
    map(x, y, n, [](A a) { return a * gate_of(a); });
}

// dx = dy (s + 2 x s (1 - s) u') with s = (1 + tanh(u)) / 2, u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2). The second term
// is 0 where s is 0 or 1, however large u' is. Moves 3 T an element.
extern "C" __global__ void __launch_bounds__(256) gelu_backward(const T* dy, const T* x, T* dx, long long n) {
    map(dy, x, dx, n, [](A d, A a) {
        const A s = gate_of(a), derivative = s * (A(1) - s);
        const A bend = derivative == A(0) ? A(0) : A(2) * a * derivative * (ROOT + 3 * ROOT * CUBE * (a * a));
        return d * (s + bend);
    });
}
