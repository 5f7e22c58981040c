// What a linear layer does besides its products. Compiled for T, the dtype, and V, elements of one word of memory,
// which divides the width.

// Every row of y (rows, width) = bias, to which a product is added. n is rows * width. Moves 1 T an element.
extern "C" __global__ void __launch_bounds__(256) broadcast_bias(const T* bias, T* y, long long n, long long width) {
    each<2>(n / V, [&](long long i) { return load<V>(bias + (i - quotient(i, width / V) * (width / V)) * V); },
            [&](long long i, const pack<T, V>& in) { store(y + i * V, in); });
}
