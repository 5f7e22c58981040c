// The squared error and its gradient. Compiled for T, the dtype of outputs; S, that of targets; and V, elements of one
// word of memory.
typedef accumulator<T>::type A;

struct output_and_target { pack<T, V> output; pack<S, V> target; };

// gradient = factor (output - target); partial[block] = the sum of (output - target)^2 that the block saw, in float64.
// Moves 2 T and 1 S an element.
extern "C" __global__ void __launch_bounds__(256)
    squared_error(const T* output, const S* target, T* gradient, double* partial, long long n, A factor) {
    __shared__ double shared[32];
    double sum = 0;
    auto gradient_of = [&](T y, S wanted) {
        const A difference = widen(y) - (A)widen(wanted);
        sum += (double)difference * (double)difference;
        return narrow<T>(factor * difference);
    };
    each<2>(n / V, [&](long long i) { return output_and_target{load<V>(output + i * V), load<V>(target + i * V)}; },
            [&](long long i, const output_and_target& in) {
                pack<T, V> out;
#pragma unroll
                for (int k = 0; k < V; ++k) out.at[k] = gradient_of(in.output.at[k], in.target.at[k]);
                store(gradient + i * V, out);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return output[rest + i]; },
            [&](long long i, T y) { gradient[rest + i] = gradient_of(y, target[rest + i]); });
    sum = add_up(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
