// Conversion of n elements from S to T. V elements make one word of the wider of the two.

// target = source, rounded to nearest even. Moves 1 S and 1 T an element.
extern "C" __global__ void __launch_bounds__(256) cast(const S* source, T* target, long long n) {
    each<2>(n / V, [&](long long i) { return load<V>(source + i * V); },
            [&](long long i, const pack<S, V>& in) {
                pack<T, V> out;
#pragma unroll
                for (int k = 0; k < V; ++k) out.at[k] = narrow<T>(widen(in.at[k]));
                store(target + i * V, out);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return source[rest + i]; },
            [&](long long i, S in) { target[rest + i] = narrow<T>(widen(in)); });
}
