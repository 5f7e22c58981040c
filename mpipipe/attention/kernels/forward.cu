// The kernels between the two matrix products of attention, and after the last of them.
//
// A problem is one key head of one batch entry. Its row r is query r / group of head r % group of those that share the
// key head. T: dtype of the products' factors, A: of everything else, O: of the result. A block of threads does one
// row; N is the number of columns that a thread holds.
typedef accumulator<T>::type A;

extern "C" __global__ void online_softmax(const A* scores, T* weights, A* sums, A* row_max, A* row_sum, int rows,
                                          int columns, int pitch, int width, int group, int start, int first_key,
                                          int low, int high, A scale, int first) {
    // weights = exp(scale q k - row_max) from scores q k, and earlier sums rescaled to the new row_max.
    //
    // scores, weights (problems, rows, columns), of which a row takes `pitch` elements; sums (problems, rows, width),
    // row_max and row_sum (problems, rows) are the result so far; with `first` there is none yet. Row r is query
    // start + r / group, column c key first_key + c; query i sees key j where low <= j - i <= high.
    __shared__ A shared[32];
    const long long row = blockIdx.x;
    const int query = start + (int)(row % rows) / group;
    const int begin = max(0, query + low - first_key), end = min(columns, query + high + 1 - first_key);
    const A nothing = -INFINITY;
    A held[N], top = nothing;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int c = threadIdx.x + n * blockDim.x;
        held[n] = c >= begin && c < end ? scale * scores[row * pitch + c] : nothing;
        top = max(top, held[n]);
    }
    const A before = first ? nothing : row_max[row];
    top = max(largest(top, shared), before);
    const A safe_max = top == nothing ? A(0) : top;
    A total = 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int c = threadIdx.x + n * blockDim.x;
        const A weight = exp(held[n] - safe_max);
        total += weight;
        if (c < columns) weights[row * pitch + c] = narrow<T>(weight);
    }
    total = add_up(total, shared);
    const A rescale = exp(before - safe_max);
    if (threadIdx.x == 0) {
        row_sum[row] = first ? total : row_sum[row] * rescale + total;
        row_max[row] = top;
    }
    if (!first && rescale != A(1))
        for (int d = threadIdx.x; d < width; d += blockDim.x) sums[row * width + d] *= rescale;
}

extern "C" __global__ void normalise(const A* sums, const A* row_max, const A* row_sum, O* out, A* lse, int rows,
                                     int width, int group, int kv_heads, int start, long long out_batch,
                                     long long out_seq, long long out_head, long long out_dim, long long lse_batch,
                                     long long lse_head, long long lse_seq, int overwrite) {
    // The normalised output and log-sum-exp of each row: set with `overwrite`, else merged into what is there.
    const long long row = blockIdx.x;
    const int problem = row / rows, r = row % rows;
    const long long b = problem / kv_heads, head = (long long)(problem % kv_heads) * group + r % group;
    const long long i = start + r / group;
    O* whole = out + b * out_batch + i * out_seq + head * out_head;
    A* place = lse + b * lse_batch + head * lse_head + i * lse_seq;
    const A nothing = -INFINITY;
    const A total = row_sum[row], theirs = total == A(0) ? nothing : row_max[row] + log(total);
    const A share = total == A(0) ? A(0) : A(1) / total;
    if (overwrite) {
        for (int d = threadIdx.x; d < width; d += blockDim.x)
            whole[d * out_dim] = narrow<O>(total == A(0) ? A(0) : sums[row * width + d] / total);
        if (threadIdx.x == 0) *place = theirs;
        return;
    }
    const A ours = *place;
    A high = ours > theirs ? ours : theirs;
    if (high == nothing) high = 0;
    const A old = exp(ours - high), part = exp(theirs - high), both = old + part;
    const A weight = both == A(0) ? A(0) : part / both;
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        const A value = widen(whole[d * out_dim]);
        whole[d * out_dim] = narrow<O>(value + weight * (sums[row * width + d] * share - value));
    }
    __syncthreads();
    if (threadIdx.x == 0) *place = high + log(both);
}
