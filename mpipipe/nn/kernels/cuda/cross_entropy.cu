// The loss of classification and its gradient. Compiled for T, the dtype; I, the integer type of the targets; and V,
// elements of one word of memory.
typedef accumulator<T>::type A;

// A row that starts anywhere: `head` elements up to the first whole word, `words` of them, and the rest.
struct span {
    const T* from;
    long long head, words, count;
    __device__ __forceinline__ span(const T* from, long long count) : from(from), count(count) {
        const int skew = reinterpret_cast<unsigned long long>(from) / sizeof(T) % V;
        head = min(count, skew ? (long long)(V - skew) : 0ll);
        words = (count - head) / V;
    }
    // The i-th of the elements outside of whole words.
    __device__ __forceinline__ long long odd(long long i) const { return i < head ? i : words * V + i; }
    __device__ __forceinline__ long long odds() const { return count - words * V; }
};

// A maximum that can be subtracted: 0 where there is none yet.
__device__ __forceinline__ A safe_max(A top) { return top == -A(INFINITY) ? A(0) : top; }

// For each row of logits (rows, vocab), on one block: loss = log(sum of exp(l - top)) - (l[id] - top), NaN for an id
// outside; gradient = factor (exp(l - top) / sum - onehot(id)). One pass finds top and sum together, and a second one
// finds the row in the L2 cache. logits and gradient start alike within a word, and may be the same array: a thread
// reads in both passes the elements that it writes, and no others. Moves 2 T an element.
extern "C" __global__ void __launch_bounds__(512, 2)
    softmax_cross_entropy(const T* logits, const I* ids, T* gradient, double* losses, long long vocab,
                          A factor) {
    constexpr int U = 4;
    __shared__ A shared[32];
    const long long row = blockIdx.x, id = ids[row];
    const span x(logits + row * vocab, vocab);
    A top = -A(INFINITY), sum = 0;
    for (long long first = threadIdx.x; first < x.words; first += (long long)blockDim.x * U) {
        pack<T, V> in[U];
        A high = top;
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < x.words) in[u] = load<V>(x.from + x.head + (first + u * blockDim.x) * V);
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < x.words)
                for (int k = 0; k < V; ++k) high = max(high, widen(in[u].at[k]));
        sum *= exponential<T>(top - safe_max(high));
        top = high;
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < x.words)
                for (int k = 0; k < V; ++k) sum += exponential<T>(widen(in[u].at[k]) - safe_max(top));
    }
    for (long long i = threadIdx.x; i < x.odds(); i += blockDim.x) {
        const A value = widen(x.from[x.odd(i)]), high = max(top, value);
        sum = sum * exponential<T>(top - safe_max(high)) + exponential<T>(value - safe_max(high));
        top = high;
    }
    const A highest = largest(top, shared);
    sum = add_up(sum * exponential<T>(top - safe_max(highest)), shared);
    if (threadIdx.x == 0 && (id < 0 || id >= vocab)) losses[row] = (double)NAN;
    const A share = factor / sum;
    T* to = gradient + row * vocab;
    auto gradient_of = [&](long long i, T value) {
        if (i == id) losses[row] = log((double)sum) - ((double)widen(value) - (double)highest);
        const A p = exponential<T>(widen(value) - highest) * share;
        return narrow<T>(i == id ? p - factor : p);
    };
    for (long long first = threadIdx.x; first < x.words; first += (long long)blockDim.x * U) {
        pack<T, V> in[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < x.words) in[u] = load<V>(x.from + x.head + (first + u * blockDim.x) * V);
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < x.words) {
                const long long i = x.head + (first + u * blockDim.x) * V;
#pragma unroll
                for (int k = 0; k < V; ++k) in[u].at[k] = gradient_of(i + k, in[u].at[k]);
                store_past_cache(to + i, in[u]);
            }
    }
    for (long long i = threadIdx.x; i < x.odds(); i += blockDim.x)
        to[x.odd(i)] = gradient_of(x.odd(i), x.from[x.odd(i)]);
}

// Slices of a head. For each row of logits (rows, width), which are the columns from `first` on of `vocab`, on one
// block: lse = log(exp(lse before) + sum of exp(l)); t = t before + the logit of id, NaN for an id outside of all
// columns. Moves 1 T an element.
extern "C" __global__ void __launch_bounds__(512)
    running_lse(const T* logits, const I* ids, const A* lse_before, const A* t_before, A* lse, A* t, long long width,
                long long first, long long vocab) {
    __shared__ A shared[32];
    const long long row = blockIdx.x, id = ids[row];
    const T* x = logits + row * width;
    A top = -A(INFINITY), sum = 0;
    for (long long i = threadIdx.x; i < width; i += blockDim.x) {
        const A value = widen(x[i]), high = max(top, value);
        sum = sum * exponential<T>(top - safe_max(high)) + exponential<T>(value - safe_max(high));
        top = high;
    }
    const A highest = safe_max(max(largest(top, shared), lse_before[row]));
    sum = add_up(sum * exponential<T>(top - highest), shared);
    if (threadIdx.x) return;
    lse[row] = A(log((double)sum + exp((double)lse_before[row] - (double)highest)) + (double)highest);
    const bool here = id >= first && id < first + width;
    t[row] = id < 0 || id >= vocab ? A(NAN) : t_before[row] + (here ? widen(x[id - first]) : A(0));
}

// out (rows, width) = dlse exp(l - lse), and dt more in column id - first; out may be logits. Moves 2 T an element.
extern "C" __global__ void __launch_bounds__(512)
    running_lse_backward(const T* logits, const I* ids, const A* lse, const A* dlse, const A* dt, T* out,
                         long long width, long long first) {
    const long long row = blockIdx.x, column = ids[row] - first;
    const A shift = lse[row], slope = dlse[row], more = dt[row];
    for (long long i = threadIdx.x; i < width; i += blockDim.x) {
        const A value = slope * exponential<T>(widen(logits[row * width + i]) - shift);
        out[row * width + i] = narrow<T>(i == column ? value + more : value);
    }
}
