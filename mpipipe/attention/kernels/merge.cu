// Merge attention results over different keys into one. T: dtype of the blocks' outputs, A: of the result and of all
// log-sum-exps, V: neighbours along dim that move together.

struct Block {
    const T* out;  // (batch, end - begin, heads, dim)
    const A* lse;  // (batch, heads, end - begin)
    int begin, end;  // the rows of the whole that it is about
};

extern "C" __global__ void merge(const T* out0, const A* lse0, int begin0, int end0, const T* out1, const A* lse1,
                                 int begin1, int end1, const T* out2, const A* lse2, int begin2, int end2,
                                 const T* out3, const A* lse3, int begin3, int end3, A* out, A* lse, long long rows,
                                 int heads, int seq, int dim) {
    // With log-sum-exps L_n and M = max L_n: out = sum_n exp(L_n - M) out_n / sum_n exp(L_n - M), lse = M + log(the sum
    // below); 0 and -inf if there is nothing. What out (batch, seq, heads, dim) and lse (batch, heads, seq) hold is one
    // more block, for all rows. All C-contiguous; rows = batch * seq * heads. A warp does one row.
    const Block blocks[4] = {{out0, lse0, begin0, end0}, {out1, lse1, begin1, end1},
                             {out2, lse2, begin2, end2}, {out3, lse3, begin3, end3}};
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const int h = row % heads, i = row / heads % seq;
    const long long b = row / heads / seq, place = (b * heads + h) * seq + i;
    const A nothing = -INFINITY;
    A weights[5], top = weights[4] = lse[place];
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
        pack<A, V> result = *(const pack<A, V>*)(out + row * dim + d);
#pragma unroll
        for (int v = 0; v < V; v++) result.at[v] *= weights[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int length = blocks[n].end - blocks[n].begin, at = i - blocks[n].begin;
            if (at < 0 || at >= length) continue;
            const pack<T, V> part = *(const pack<T, V>*)(blocks[n].out + ((b * length + at) * heads + h) * dim + d);
#pragma unroll
            for (int v = 0; v < V; v++) result.at[v] += weights[n] * A(widen(part.at[v]));
        }
        *(pack<A, V>*)(out + row * dim + d) = result;
    }
    wait_for_warp();
    if (threadIdx.x % 32 == 0) lse[place] = top == nothing ? nothing : safe_max + log(total);
}
