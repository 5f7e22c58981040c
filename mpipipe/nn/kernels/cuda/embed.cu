// Rows of a table by number. Compiled for T, the dtype; I, the integer type of the numbers; and V, elements of one word
// of memory, which divides dim.
typedef accumulator<T>::type A;

// y (count, dim) = weight[ids], weight (vocab, dim); a row of NaN for an id outside. n is count * dim. Moves 2 T an
// element.
extern "C" __global__ void __launch_bounds__(256)
    embed(const T* weight, const I* ids, T* y, long long n, long long dim, long long vocab) {
    each<2>(n / V,
            [&](long long i) {
                const long long row = quotient(i, dim / V), id = ids[row];
                if (id >= 0 && id < vocab) return load<V>(weight + id * dim + (i - row * (dim / V)) * V);
                pack<T, V> none;
#pragma unroll
                for (int k = 0; k < V; ++k) none.at[k] = narrow<T>(A(NAN));
                return none;
            },
            [&](long long i, const pack<T, V>& in) { store(y + i * V, in); });
}

// The gradient needs the rows of equal ids side by side, in their order: a counting sort does that. TILE consecutive
// rows are counted together. Ids outside count as `vocab` and are left out in the end.
constexpr int TILE = 1024;

__device__ __forceinline__ int bucket_of(long long id, int vocab) { return id >= 0 && id < vocab ? (int)id : vocab; }

// tally (tiles, vocab + 1), zero before: how often each id is in each tile. Integers, so that their order does not
// matter. Moves 1 I and 8 bytes a row.
extern "C" __global__ void __launch_bounds__(1024) tally_ids(const I* ids, int* tally, int count, int vocab) {
    const int row = blockIdx.x * TILE + threadIdx.x;
    if (row < count) atomicAdd(tally + blockIdx.x * (vocab + 1ll) + bucket_of(ids[row], vocab), 1);
}

// totals[b]: the sum of the tallies of the TILE ids that block b has. Moves 4 bytes a tally.
extern "C" __global__ void __launch_bounds__(1024) total_tallies(const int* tally, int* totals, int tiles, int vocab) {
    __shared__ int shared[32];
    const int id = blockIdx.x * TILE + threadIdx.x;
    int sum = 0;
    if (id <= vocab)
        for (int tile = 0; tile < tiles; ++tile) sum += tally[tile * (vocab + 1ll) + id];
    sum = add_up(sum, shared);
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// Each tally becomes the place of the first such row in the sorted order: after all smaller ids, and after the same id
// in earlier tiles. starts (vocab + 1): the place of the first row of each id. Moves 12 bytes a tally, of which 4 are
// in cache.
extern "C" __global__ void __launch_bounds__(1024)
    place_tallies(int* tally, const int* totals, int* starts, int tiles, int vocab) {
    __shared__ int shared[32], running[TILE];
    const int id = blockIdx.x * TILE + threadIdx.x;
    int before = 0, mine = 0;
    for (int block = threadIdx.x; block < blockIdx.x; block += TILE) before += totals[block];
    before = add_up(before, shared);
    if (id <= vocab)
        for (int tile = 0; tile < tiles; ++tile) mine += tally[tile * (vocab + 1ll) + id];
    running[threadIdx.x] = mine;
    for (int reach = 1; reach < TILE; reach *= 2) {
        __syncthreads();
        const int other = threadIdx.x >= reach ? running[threadIdx.x - reach] : 0;
        __syncthreads();
        running[threadIdx.x] += other;
    }
    if (id > vocab) return;
    int place = before + running[threadIdx.x] - mine;
    starts[id] = place;
    for (int tile = 0; tile < tiles; ++tile) {
        const int here = tally[tile * (vocab + 1ll) + id];
        tally[tile * (vocab + 1ll) + id] = place;
        place += here;
    }
}

// order and keys: the rows and their ids in sorted order. A row comes after those of its tile with its id that are
// above it. Moves 1 I and 12 bytes a row.
extern "C" __global__ void __launch_bounds__(1024)
    sort_rows(const I* ids, const int* places, int* order, int* keys, int count, int vocab) {
    __shared__ __attribute__((aligned(16))) int tile[TILE];
    const int row = blockIdx.x * TILE + threadIdx.x, id = row < count ? bucket_of(ids[row], vocab) : -1;
    tile[threadIdx.x] = id;
    __syncthreads();
    if (row >= count) return;
    int place = places[blockIdx.x * (vocab + 1ll) + id];
    const int whole = threadIdx.x / 4;
    for (int j = 0; j < whole; ++j) {
        const pack<int, 4> four = load<4>(tile + j * 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) place += four.at[k] == id;
    }
    for (int j = whole * 4; j < threadIdx.x; ++j) place += tile[j] == id;
    order[place] = row;
    keys[place] = id;
}

// Sorted rows are added in spans of SPAN, one thread for each word of a span. The sum of an id whose rows all lie in
// one span goes to grad at once. Otherwise join_spans adds up `parts` (2, spans, dim): a span leaves the sum that ends
// in it in part 0, and the sum that goes on in part 1.
constexpr int SPAN = 32, U = 8;

// grad[keys[i]] += dy[order[i]] for dy (count, dim), grad (vocab, dim). Moves 1 T an element of dy, and 2 A an element
// of the rows of grad that are touched. n is spans * dim / V.
extern "C" __global__ void __launch_bounds__(128)
    add_spans(const T* dy, const int* order, const int* keys, A* grad, A* parts, long long n, int count, long long dim,
              int vocab) {
    const long long words = dim / V, i = blockIdx.x * 128ll + threadIdx.x;
    if (i >= n) return;
    const long long span = quotient(i, words), column = (i - span * words) * V;
    const int first = span * SPAN, stop = min(count, first + SPAN);
    bool ours = first == 0 || keys[first - 1] != keys[first];  // whether the present sum began in this span
    pack<A, V> sum;
#pragma unroll
    for (int k = 0; k < V; ++k) sum.at[k] = 0;
    for (int at = first; at < stop; at += U) {
        pack<T, V> in[U];
        pack<A, V> old[U];
        int key[U + 1];
#pragma unroll
        for (int u = 0; u <= U; ++u) key[u] = at + u < count ? keys[at + u] : -1;
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (at + u < stop && key[u] < vocab) {
                in[u] = load<V>(dy + order[at + u] * dim + column);
                if (key[u] != key[u + 1]) old[u] = load<V>(grad + key[u] * dim + column);
            }
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (at + u < stop && key[u] < vocab) {
#pragma unroll
                for (int k = 0; k < V; ++k) sum.at[k] += widen(in[u].at[k]);
                if (key[u] == key[u + 1]) continue;
#pragma unroll
                for (int k = 0; k < V; ++k) sum.at[k] = ours ? old[u].at[k] + sum.at[k] : sum.at[k];
                store((ours ? grad + key[u] * dim : parts + span * dim) + column, sum);
                ours = true;
#pragma unroll
                for (int k = 0; k < V; ++k) sum.at[k] = 0;
            }
    }
    if (stop < count && keys[stop - 1] == keys[stop] && keys[stop] < vocab)
        store(parts + (quotient(count + SPAN - 1, SPAN) + span) * dim + column, sum);
}

// For each id whose rows begin in one span and go on: grad += its parts in their order. One thread for each word of the
// span where they begin. Moves 1 A an element of the parts, and 2 A an element of the rows of grad.
extern "C" __global__ void __launch_bounds__(128)
    join_spans(const int* keys, const int* starts, A* grad, const A* parts, long long n, int count, long long dim,
               int vocab) {
    const long long words = dim / V, i = blockIdx.x * 128ll + threadIdx.x;
    if (i >= n) return;
    const int span = quotient(i, words), stop = min(count, (span + 1) * SPAN);
    if (stop == count) return;
    const int key = keys[stop - 1];
    if (key >= vocab || keys[stop] != key || starts[key] < span * SPAN) return;
    const long long column = (i - span * words) * V;
    const A* open = parts + quotient(count + SPAN - 1, SPAN) * dim + column;
    const int last = (starts[key + 1] - 1) / SPAN;
    pack<A, V> sum = load<V>(open + span * dim);
    for (int at = span + 1; at <= last; at += U) {
        pack<A, V> in[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (at + u <= last) in[u] = load<V>(at + u < last ? open + (at + u) * dim : parts + last * dim + column);
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (at + u <= last)
                for (int k = 0; k < V; ++k) sum.at[k] += in[u].at[k];
    }
    pack<A, V> old = load<V>(grad + key * dim + column);
#pragma unroll
    for (int k = 0; k < V; ++k) old.at[k] += sum.at[k];
    store(grad + key * dim + column, old);
}
