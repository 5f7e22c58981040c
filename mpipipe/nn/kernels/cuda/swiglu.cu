// SwiGLU of matrices both = gate | up (rows, 2 hidden). Compiled for T, the dtype, and V, elements of one word of
// memory, which divides hidden. n is rows * hidden.
typedef accumulator<T>::type A;
typedef pack<T, V> P;

struct gate_up_inner { P gate, up, inner; };

// 1 / (1 + exp(-x)).
__device__ __forceinline__ A sigmoid(A x) { return ratio<T>(A(1), A(1) + exponential<T>(-x)); }

// inner = silu(gate) up. Moves 3 T an element of inner.
extern "C" __global__ void __launch_bounds__(256) swiglu(const T* both, T* inner, long long n, long long hidden) {
    each<2>(n / V,
            [&](long long i) {
                const T* gate = both + (i + quotient(i, hidden / V) * (hidden / V)) * V;
                return gate_up_inner{load<V>(gate), load<V>(gate + hidden), P()};
            },
            [&](long long i, const gate_up_inner& in) {
                P out;
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const A gate = widen(in.gate.at[k]);
                    out.at[k] = narrow<T>(gate * sigmoid(gate) * widen(in.up.at[k]));
                }
                store(inner + i * V, out);
            });
}

// With s = sigmoid(gate), a = gate s: dup = dinner a, dgate = dinner up (s + a (1 - s)), inner = a up; inner may be
// dinner. Moves 6 T an element of inner.
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward(const T* both, const T* dinner, T* dboth, T* inner, long long n, long long hidden) {
    each<1>(n / V,
            [&](long long i) {
                const T* gate = both + (i + quotient(i, hidden / V) * (hidden / V)) * V;
                return gate_up_inner{load<V>(gate), load<V>(gate + hidden), load<V>(dinner + i * V)};
            },
            [&](long long i, const gate_up_inner& in) {
                P dgate, dup, out;
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const A gate = widen(in.gate.at[k]), up = widen(in.up.at[k]), d = widen(in.inner.at[k]);
                    const A s = sigmoid(gate), a = gate * s;
                    dgate.at[k] = narrow<T>(d * up * (s + a * (A(1) - s)));
                    dup.at[k] = narrow<T>(d * a);
                    out.at[k] = narrow<T>(a * up);
                }
                T* to = dboth + (i + quotient(i, hidden / V) * (hidden / V)) * V;
                store(to, dgate);
                store(to + hidden, dup);
                store(inner + i * V, out);
            });
}
