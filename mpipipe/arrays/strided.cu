// A copy between arrays (n0, n1, n2, n3, n4) with any strides, in elements. Compiled for S and U, the dtypes of source
// and target; I, an integer type that holds every offset; and V, elements of one word of memory. Where V is above 1,
// the last strides are 1, and V divides n4 and all other strides.

template <typename To, typename From> __device__ __forceinline__ To converted(From value, const To*) {
    return narrow<To>(widen(value));
}
template <typename X> __device__ __forceinline__ X converted(X value, const X*) { return value; }

struct source_and_old { pack<S, V> source; pack<U, V> old; };

// target = source or, with `add`, target += source. count is the number of words. Moves 1 S and 1 U an element, and 1 U
// more with `add`.
extern "C" __global__ void __launch_bounds__(256)
    strided_copy(const S* source, U* target, I count, I n1, I n2, I n3, I n4, I s0, I s1, I s2, I s3, I s4, I t0, I t1,
                 I t2, I t3, I t4, int add) {
    const I words = n4 / V;
    auto offset = [&](I i, I a0, I a1, I a2, I a3, I a4) {
        const I i3 = i / words, i2 = i3 / n3, i1 = i2 / n2, i0 = i1 / n1;
        return i0 * a0 + (i1 - i0 * n1) * a1 + (i2 - i1 * n2) * a2 + (i3 - i2 * n3) * a3 + (i - i3 * words) * V * a4;
    };
    each<2>(count,
            [&](long long i) {
                source_and_old in;
                in.source = load<V>(source + offset(i, s0, s1, s2, s3, s4));
                if (add) in.old = load<V>(target + offset(i, t0, t1, t2, t3, t4));
                return in;
            },
            [&](long long i, const source_and_old& in) {
                pack<U, V> out;
#pragma unroll
                for (int k = 0; k < V; ++k)
                    out.at[k] = add ? narrow<U>(widen(in.old.at[k]) + widen(in.source.at[k]))
                                    : converted(in.source.at[k], target);
                store(target + offset(i, t0, t1, t2, t3, t4), out);
            });
}
