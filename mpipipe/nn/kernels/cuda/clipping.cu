// Clipping by the norm, with a factor that stays in the memory of the device.

// A sum of doubles and what its roundings lost, so together more than 100 bits.
struct Sum {
    double high, low;
    // Knuth, "The Art of Computer Programming" II, 4.2.2, theorem B: the rounding of one addition, exactly.
    __device__ __forceinline__ void add(double term) {
        const double total = high + term, part = total - high;
        low += (high - (total - part)) + (term - part);
        high = total;
    }
};

// factor = c / divisor, where c = max_norm / norm if norm = sqrt(sum of squares) / scale is above max_norm, else 1; NaN
// where the sum is not finite. On one warp, in a fixed order.
extern "C" __global__ void __launch_bounds__(32)
    clip_factor(const double* squares, double* factor, long long count, double max_norm, double scale, double divisor) {
    Sum sum{0, 0};
    for (long long i = threadIdx.x; i < count; i += 32) sum.add(squares[i]);
    for (int offset = 16; offset > 0; offset /= 2) {
        const double high = from_partner(sum.high, offset), low = from_partner(sum.low, offset);
        sum.add(high);
        sum.low += low;
    }
    if (threadIdx.x > 0) return;
    const double total = sum.high + sum.low, norm = sqrt(total) / scale;
    const bool finite = total - total == 0;
    *factor = finite ? (norm > max_norm ? max_norm / norm : 1) / divisor : (double)NAN;
}

// x *= factor, rounded to T first; x is not read where that is 1 or NaN. Compiled for V elements of one word of memory.
// Moves 2 T an element.
extern "C" __global__ void __launch_bounds__(256) rescale(T* x, const double* factor, long long n) {
    const double exact = *factor;
    if (exact == 1 || exact != exact) return;
    const T scale = (T)exact;
    each<2>(n / V, [&](long long i) { return load<V>(x + i * V); },
            [&](long long i, pack<T, V> now) {
#pragma unroll
                for (int k = 0; k < V; ++k) now.at[k] *= scale;
                store(x + i * V, now);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return x[rest + i]; }, [&](long long i, T now) { x[rest + i] = now * scale; });
}
