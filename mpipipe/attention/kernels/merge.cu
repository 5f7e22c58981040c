// Merge attention results over different keys into one. T: dtype of the blocks' outputs, O: of the result, A: of
// earlier sums and of log-sum-exps, V: neighbours along dim that move together.

struct Block {
    const T* out;  // (batch, end - begin, heads, dim)
    const A* lse;  // (batch, heads, end - begin)
    int begin, end;  // the rows of the whole that it is about
};

extern "C" __global__ void merge(const T* out0, const A* lse0, int begin0, int end0, const T* out1, const A* lse1,
                                 int begin1, int end1, const T* out2, const A* lse2, int begin2, int end2,
                                 const T* out3, const A* lse3, int begin3, int end3, const A* sum, const A* sum_lse,
                                 int summed, O* out, A* lse, long long rows, int heads, int seq, int dim) {
    // With log-sum-exps L_n and M = max L_n: out = sum_n exp(L_n - M) out_n / sum_n exp(L_n - M), lse = M + log(the sum
    // below); 0 and -inf if there is nothing. sum (batch, seq, heads, dim) and sum_lse (batch, heads, seq) are one
    // more block, for all rows, if `summed`; out and lse have the same shapes, and may be the same memory. All
    // C-contiguous; rows = batch * seq * heads. A warp does one row.
    const Block blocks[4] = {{out0, lse0, begin0, end0}, {out1, lse1, begin1, end1},
                             {out2, lse2, begin2, end2}, {out3, lse3, begin3, end3}};
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const int h = row % heads, i = row / heads % seq;
    const long long b = row / heads / seq, place = (b * heads + h) * seq + i;
    const A nothing = -INFINITY;
    A weights[5], top = weights[4] = summed ? sum_lse[place] : nothing;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int length = blocks[n].end - blocks[n].begin, at = i - blocks[n].begin;
        weights[n] = at >= 0 && at < length ? blocks[n].lse[(b * heads + h) * length + at] : nothing;
        top = max(top, weights[n]);
    }
    const A safe_max = top == nothing ? A(0) : top;
    A total = 0;
#pragma unroll
    for (int n = 0; n < 5; n++) {
        weights[n] = exp(weights[n] - safe_max);
        total += weights[n];
    }
#pragma unroll
    for (int n = 0; n < 5; n++) weights[n] = total == A(0) ? A(0) : weights[n] / total;
    for (int d = threadIdx.x % 32 * V; d < dim; d += 32 * V) {
        A result[V];
#pragma unroll
        for (int v = 0; v < V; v++) result[v] = 0;
        if (summed) {
            const pack<A, V> part = *(const pack<A, V>*)(sum + row * dim + d);
#pragma unroll
            for (int v = 0; v < V; v++) result[v] += weights[4] * part.at[v];
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int length = blocks[n].end - blocks[n].begin, at = i - blocks[n].begin;
            if (at < 0 || at >= length) continue;
            const pack<T, V> part = *(const pack<T, V>*)(blocks[n].out + ((b * length + at) * heads + h) * dim + d);
#pragma unroll
            for (int v = 0; v < V; v++) result[v] += weights[n] * A(widen(part.at[v]));
        }
        pack<O, V> rounded;
#pragma unroll
        for (int v = 0; v < V; v++) rounded.at[v] = narrow<O>(result[v]);
        *(pack<O, V>*)(out + row * dim + d) = rounded;
    }
    wait_for_warp();
    if (threadIdx.x % 32 == 0) lse[place] = top == nothing ? nothing : safe_max + log(total);
}
