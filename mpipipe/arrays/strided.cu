// Elements of an array with five axes go to another of the same shape. V of them that are neighbours on both sides move
// together. S, U: dtypes of source and target; I: an integer that holds any offset.

extern "C" __global__ void move(const S* source, U* target, I count, I n1, I n2, I n3, I n4,
                                I s0, I s1, I s2, I s3, I s4, I t0, I t1, I t2, I t3, I t4, int add) {
    // target = source or, with `add`, target += source; n4 counts groups of V, and so do the strides s4 and t4.
    const I at = (I)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    I rest = at / n4;
    const I i4 = at - rest * n4, i3 = rest % n3;
    rest /= n3;
    const I i2 = rest % n2;
    rest /= n2;
    const I i1 = rest % n1, i0 = rest / n1;
    const pack<S, V> from = *(const pack<S, V>*)(source + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4);
    pack<U, V>* to = (pack<U, V>*)(target + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3 + i4 * t4);
    pack<U, V> result;
    if (add) result = *to;
#pragma unroll
    for (int v = 0; v < V; v++) {
        const auto value = widen(from.at[v]);
        result.at[v] = narrow<U>(add ? widen(result.at[v]) + value : value);
    }
    *to = result;
}
