// The kernels between the matrix products of attention's backward (Dao, "FlashAttention-2", 2023, algorithm 2).
// Problems, rows and dtypes as in forward.cu.
typedef accumulator<T>::type A;

extern "C" __global__ void dot(const T* dout, const T* out, A* delta, long long rows, int heads, int seq, int dim,
                               long long dout_batch, long long dout_seq, long long dout_head, long long dout_dim,
                               long long out_batch, long long out_seq, long long out_head, long long out_dim) {
    // delta (batch, heads, seq) = sum over dim of dout * out, both (batch, seq, heads, dim); a warp does one row.
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const long long i = row % seq, head = row / seq % heads, b = row / seq / heads;
    const T* one = dout + b * dout_batch + i * dout_seq + head * dout_head;
    const T* other = out + b * out_batch + i * out_seq + head * out_head;
    A sum = 0;
    for (int d = threadIdx.x % 32; d < dim; d += 32) sum += A(widen(one[d * dout_dim])) * A(widen(other[d * out_dim]));
    for (int offset = 16; offset > 0; offset /= 2) sum += from_partner(sum, offset);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

extern "C" __global__ void softmax_backward(const A* scores, const A* products, T* weights, T* slopes, const A* lse,
                                            const A* delta, int rows, int columns, int pitch, int group, int kv_heads,
                                            int seq, int q_start, int start, int first_key, int low, int high, A scale,
                                            long long lse_batch, long long lse_head, long long lse_seq) {
    // P = exp(scale q k - lse) and dS = P (dout v - delta), from scores q k and products dout v.
    //
    // scores, products, weights, slopes (problems, rows, columns), of which a row takes `pitch` elements; lse any
    // strides, delta (batch, heads, seq). Row r is query start + r / group of the slice, which begins at query q_start
    // of the whole. Masks as in forward.cu. Rows that see nothing (lse -inf) have weights 0.
    const long long row = blockIdx.x;
    const int problem = row / rows, r = row % rows;
    const int query = start + r / group;
    const long long b = problem / kv_heads, head = (long long)(problem % kv_heads) * group + r % group;
    const long long i = (long long)q_start + query;
    const A level = lse[b * lse_batch + head * lse_head + i * lse_seq];
    const A mean = delta[(b * kv_heads * group + head) * seq + i];
    const A nothing = -INFINITY;
    const int begin = max(0, query + low - first_key);
    const int end = level == nothing ? 0 : min(columns, query + high + 1 - first_key);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const long long at = row * pitch + c;
        const bool seen = c >= begin && c < end;
        const A weight = seen ? exp(scale * scores[at] - level) : A(0);
        const A slope = seen ? weight * (products[at] - mean) : A(0);
        weights[at] = narrow<T>(weight);
        slopes[at] = narrow<T>(slope);
    }
}
