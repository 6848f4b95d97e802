// NCCL between the processes of one machine: each call runs on its stream's thread, as a kernel would.
// Calls of a communicator run one at a time in the order of their launch, whatever their streams.
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "nccl_types.h"
#include "numbers.h"
#include "segment.h"

using namespace emulated;
using segment::Announcement;
using segment::Transfer;

namespace {
constexpr size_t CHUNK_BYTES = 1 << 20;  // a reduction's data is gathered in pieces of this size
constexpr int DESTROY_MILLISECONDS = 10000;

enum CallKind : uint32_t { SEND = 1, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER };
const char* NAMES[] = {"",           "send/recv",      "all_reduce", "reduce", "broadcast",
                       "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"};

struct Factor {  // of a PREMUL_SUM
  std::vector<char> value;
  const void* pointer;  // in device memory, if it is not null
  bool is_destroyed = false;
};
}  // namespace

struct Communicator {
  Communicator(int rank, int size) : size(size), rank(rank), shared(rank, size) {}
  int size, rank, device = 0;
  std::string name;
  segment::Segment shared;
  uint64_t children = 0, splits = 0;
  std::atomic<int> error{0};
  std::string error_text;
  std::vector<Factor> factors;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t launched = 0, turn = 0;
  bool is_running = false;
  std::atomic<int> graphs{0};  // that hold calls on it and have not been destroyed
  std::atomic<bool> has_ended{false};  // its destruction has begun: the real library frees the memory
};

namespace {
struct Call {
  CallKind kind;
  bool sends;  // of a message
  char *send, *recv;
  size_t count;
  int type, op, root;
  Communicator* comm;
  Stream* stream;
  std::vector<Range> touched;
  Factor factor;  // a copy, because the op may be destroyed once the call has returned
};
struct Group {
  int depth = 0;
  std::vector<Call> calls;
  std::vector<std::function<Result()>> starts;
};
thread_local Group group;
thread_local std::string last_error;

Result fail(Result code, const std::string& text) {
  last_error = text;
  say("NCCL: %s", text.c_str());
  return code;
}
bool is_used_after_end(Communicator* comm, const char* call) {
  if (!comm || !comm->has_ended) return false;
  violation("NCCL: use after free: %s on rank %d of %d, after ncclCommDestroy or ncclCommAbort has begun", call,
            comm->rank, comm->size);
  return true;
}

// The library works on its communicator's device and sets the thread's own one again, which starts a context there.
struct OnDevice {
  int before = current_device();
  explicit OnDevice(const Communicator* comm) { set(comm->device); }
  ~OnDevice() { set(before); }
  static void set(int device) {
    if (device != current_device()) set_device(device);
  }
};

// -- one call --------------------------------------------------------------------------------------
std::string described(const Announcement& call) {
  char text[128];
  snprintf(text, sizeof text, "%s of %zu bytes (type %u, root %d)", NAMES[std::min<uint32_t>(call.call & 255, SCATTER)],
           size_t(call.bytes), call.type, int(call.call >> 8));
  return text;
}
bool carry_out(Communicator* comm, std::vector<Transfer>& transfers) {
  if (comm->shared.carry_out(transfers)) return true;
  if (const Transfer* wrong = comm->shared.mismatched; wrong && !comm->error) {
    comm->error_text = "rank " + std::to_string(comm->rank) + " makes " + described(wrong->expected) + ", and rank " +
                       std::to_string(wrong->peer) + " " + described(wrong->received);
    comm->error = INVALID_USAGE;
    violation("NCCL: calls do not match: %s", comm->error_text.c_str());
    comm->shared.aborted = true;  // of this rank only; the others hang, as NCCL's would
  }
  return false;
}
Announcement announce(const Call& call, size_t bytes, int root) {
  return {uint32_t(call.kind) | uint32_t(root) << 8, uint32_t(call.type), bytes};
}
void combine(Communicator* comm, const Call& call, char* out, const std::vector<const char*>& inputs, size_t count) {
  const void* factor = nullptr;
  if (call.op >= PREDEFINED_OPS) factor = call.factor.pointer ? bytes_at(call.factor.pointer) : call.factor.value.data();
  numbers::combine(out, inputs, count, call.type, call.op, factor);
}

// Reduce `count` elements to `root`; -1 stands for all ranks, each of which then computes the whole.
bool reduce_to(Communicator* comm, const Call& call, const char* send, char* recv, size_t count, int root) {
  size_t width = SIZES[call.type], most = CHUNK_BYTES / width;
  bool receives = root < 0 || root == comm->rank;
  std::vector<std::vector<char>> received(comm->size);
  for (size_t first = 0; first < count; first += most) {
    size_t elements = std::min(most, count - first), bytes = elements * width;
    char* mine = (char*)send + first * width;
    Announcement announcement = announce(call, bytes, std::max(root, 0));
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < comm->size; peer++) {
      if (peer == comm->rank) continue;
      if (receives) {
        received[peer].resize(bytes);
        transfers.push_back({false, peer, received[peer].data(), bytes, announcement});
      }
      if (root < 0 || peer == root) transfers.push_back({true, peer, mine, bytes, announcement});
    }
    if (!carry_out(comm, transfers)) return false;
    if (!receives) continue;
    std::vector<const char*> inputs;
    for (int rank = 0; rank < comm->size; rank++)
      inputs.push_back(rank == comm->rank ? mine : received[rank].data());
    combine(comm, call, recv + first * width, inputs, elements);
  }
  return true;
}
bool reduce_and_scatter(Communicator* comm, const Call& call) {
  size_t bytes = call.count * SIZES[call.type];
  std::vector<char> share(bytes);  // in place: the later shares are still to be sent
  for (int root = 0; root < comm->size; root++)
    if (!reduce_to(comm, call, call.send + root * bytes, share.data(), call.count, root)) return false;
  memcpy(call.recv, share.data(), bytes);
  return true;
}

bool run(Communicator* comm, const Call& call) {
  size_t bytes = call.count * SIZES[call.type];
  Announcement announcement = announce(call, bytes, call.root);
  std::vector<Transfer> transfers;
  auto send_to = [&](int peer, char* data) { transfers.push_back({true, peer, data, bytes, announcement}); };
  auto receive_from = [&](int peer, char* data) { transfers.push_back({false, peer, data, bytes, announcement}); };
  switch (call.kind) {
    case ALL_REDUCE: return reduce_to(comm, call, call.send, call.recv, call.count, -1);
    case REDUCE: return reduce_to(comm, call, call.send, call.recv, call.count, call.root);
    case REDUCE_SCATTER: return reduce_and_scatter(comm, call);
    case BROADCAST:
      if (comm->rank != call.root) {
        receive_from(call.root, call.recv);
        break;
      }
      for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank) send_to(rank, call.send);
      if (call.recv != call.send) memmove(call.recv, call.send, bytes);
      break;
    case ALL_GATHER:
      if (call.recv + comm->rank * bytes != call.send) memmove(call.recv + comm->rank * bytes, call.send, bytes);
      for (int rank = 0; rank < comm->size; rank++) {
        if (rank == comm->rank) continue;
        send_to(rank, call.send);
        receive_from(rank, call.recv + rank * bytes);
      }
      break;
    case ALL_TO_ALL:
      for (int rank = 0; rank < comm->size; rank++) {
        send_to(rank, call.send + rank * bytes);
        receive_from(rank, call.recv + rank * bytes);
      }
      break;
    case GATHER:
      for (int rank = 0; rank < comm->size && comm->rank == call.root; rank++)
        receive_from(rank, call.recv + rank * bytes);
      send_to(call.root, call.send);
      break;
    case SCATTER:
      for (int rank = 0; rank < comm->size && comm->rank == call.root; rank++) send_to(rank, call.send + rank * bytes);
      receive_from(call.root, call.recv);
      break;
    case SEND: break;
  }
  return carry_out(comm, transfers);
}
void run_all(Communicator* comm, const std::vector<Call>& calls) {
  std::vector<Transfer> messages;
  for (const Call& call : calls) {
    if (call.kind != SEND) continue;
    size_t bytes = call.count * SIZES[call.type];
    char* data = call.sends ? call.send : call.recv;
    messages.push_back({call.sends, call.root, data, bytes, announce(call, bytes, 0)});
  }
  if (!messages.empty() && !carry_out(comm, messages)) return;
  for (const Call& call : calls)
    if (call.kind != SEND && !run(comm, call)) return;
}

// -- launches --------------------------------------------------------------------------------------
// Whether a call's two buffers lie as NCCL's call in place wants them.
bool is_in_place(const Call& call) {
  size_t place = call.comm->rank * call.count * SIZES[call.type];
  switch (call.kind) {
    case ALL_REDUCE: case REDUCE: case BROADCAST: return call.send == call.recv;
    case ALL_GATHER: case GATHER: return call.send == call.recv + place;
    case REDUCE_SCATTER: case SCATTER: return call.recv == call.send + place;
    default: return false;
  }
}
// Kernels read and write in any order: what one call of a launch writes, no other part of it may use.
void check_overlaps(const std::vector<Call>& calls) {
  for (size_t i = 0; i < calls.size(); i++)
    for (const Range& written : calls[i].touched)
      for (size_t j = 0; j < calls.size() && written.use == Use::Write; j++)
        for (const Range& other : calls[j].touched) {
          if (&other == &written || !other.size || !written.size || (i == j && is_in_place(calls[i]))) continue;
          // torch's pipelining connects its neighbours by messages of one element, all into the same
          // and NCCL leaves out what a rank sends to itself in place
          int rank = calls[i].comm->rank;
          bool is_to_self = calls[j].kind == SEND && calls[i].root == rank && calls[j].root == rank;
          bool is_allowed = calls[i].kind == SEND && (other.use == Use::Write || is_to_self);
          if (is_allowed && other.start == written.start) continue;
          auto begin = (const char*)written.start, start = (const char*)other.start;
          if (begin < start + other.size && start < begin + written.size)
            violation("NCCL: %s writes %zu bytes at %p, which %s of the same launch uses too (%zu bytes at %p)",
                      NAMES[calls[i].kind], written.size, written.start, i == j ? "it" : NAMES[calls[j].kind],
                      other.size, other.start);
        }
}
Result submit(Communicator* comm, std::vector<Call> calls) {
  if (comm->shared.aborted) return fail(INVALID_USAGE, "the communicator was aborted");
  check_overlaps(calls);
  Stream* stream = calls[0].stream;
  std::vector<Stream*> others;
  std::vector<Range> touched;
  for (const Call& call : calls) {
    if (call.stream != stream && !std::count(others.begin(), others.end(), call.stream)) others.push_back(call.stream);
    touched.insert(touched.end(), call.touched.begin(), call.touched.end());
  }
  for (Stream* each : others) follow(stream, each);
  Graph* graph = nullptr;
  bool is_captured = capture_status(stream, nullptr, &graph) != 0;
  uint64_t ticket = 0;
  if (is_captured) {
    comm->graphs++;
    retain(graph, [comm] { comm->graphs--; });
  } else {
    std::lock_guard<std::mutex> lock(comm->mutex);
    ticket = comm->launched++;
  }
  const char* what = NAMES[calls[0].kind];
  auto shared_calls = std::make_shared<std::vector<Call>>(std::move(calls));
  auto task = [comm, shared_calls, is_captured, ticket] {
    {
      std::unique_lock<std::mutex> lock(comm->mutex);
      comm->changed.wait(lock, [&] { return !comm->is_running && (is_captured || comm->turn == ticket); });
      comm->is_running = true;
    }
    if (!comm->shared.aborted) run_all(comm, *shared_calls);
    std::lock_guard<std::mutex> lock(comm->mutex);
    comm->is_running = false;
    if (!is_captured) comm->turn++;
    comm->changed.notify_all();
  };
  if (Code code = enqueue(stream, task, touched, what)) return fail(UNHANDLED_CUDA_ERROR, text_of(code));
  for (Stream* each : others) follow(each, stream);
  return SUCCESS;
}
bool is_usable(const void* pointer, size_t bytes) {
  Kind kind = bytes ? kind_of(pointer) : Kind::Host;
  return kind == Kind::Host || (kind == Kind::Device && is_allocated(pointer, bytes));
}
Result take(CallKind kind, bool sends, const void* send, void* recv, size_t count, int type, int op, int root,
            Communicator* comm, void* stream, size_t send_shares, size_t recv_shares) {
  if (!comm) return fail(INVALID_ARGUMENT, "no communicator");
  const std::string name = NAMES[kind];
  if (is_used_after_end(comm, NAMES[kind])) return INVALID_USAGE;
  if (comm->error) return Result(comm->error.load());
  if (type < 0 || type >= DATA_TYPES) return fail(INVALID_ARGUMENT, name + ": unknown type " + std::to_string(type));
  if (root < 0 || root >= comm->size) return fail(INVALID_ARGUMENT, name + ": no such rank: " + std::to_string(root));
  bool is_known = op >= 0 && op < PREDEFINED_OPS + int(comm->factors.size());
  if (!is_known || (op >= PREDEFINED_OPS && comm->factors[op - PREDEFINED_OPS].is_destroyed))
    return fail(INVALID_ARGUMENT, name + ": unknown op");
  size_t bytes = count * SIZES[type];
  if (!is_usable(send, bytes * send_shares))
    return fail(INVALID_ARGUMENT, name + ": sendbuff is not device memory, or too short");
  if (!is_usable(recv, bytes * recv_shares))
    return fail(INVALID_ARGUMENT, name + ": recvbuff is not device memory, or too short");
  Call call{kind, sends, (char*)bytes_at(send), (char*)bytes_at(recv), count, type, op, root, comm, nullptr, {}, {}};
  if (op >= PREDEFINED_OPS) call.factor = comm->factors[op - PREDEFINED_OPS];
  call.touched = {{send, bytes * send_shares}, {recv, bytes * recv_shares, Use::Write}};
  OnDevice guard(comm);
  call.stream = stream_of(stream);
  if (!call.stream) return fail(INVALID_ARGUMENT, name + ": no such stream");
  if (device_of(call.stream) != comm->device)
    return fail(INVALID_ARGUMENT, name + ": the stream is of another device than the communicator");
  if (traces()) say("NCCL %s of %zu on %s rank %d", NAMES[kind], count, comm->name.c_str(), comm->rank);
  if (!group.depth) return submit(comm, {call});
  group.calls.push_back(call);
  return SUCCESS;
}

// -- communicators ---------------------------------------------------------------------------------
Result join(Communicator** out, const std::string& name, int size, int rank, int device) {
  *out = nullptr;
  if (size > segment::MOST_RANKS) return fail(INVALID_ARGUMENT, "too many ranks for the emulated NCCL");
  if (rank < 0 || rank >= size) return fail(INVALID_ARGUMENT, "no such rank: " + std::to_string(rank));
  auto* comm = new Communicator(rank, size);
  comm->name = name;
  comm->device = device;
  if (!comm->shared.open(name, uuid(device))) return fail(SYSTEM_ERROR, "no shared memory for " + name);
  const char* may_share = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  int other, sharing = may_share && atoi(may_share) ? -1 : comm->shared.first_sharing(&other);
  if (sharing >= 0) {
    std::string ranks = "rank " + std::to_string(other) + " and rank " + std::to_string(sharing);
    return fail(INVALID_USAGE, "Duplicate GPU detected : " + ranks);
  }
  if (traces()) say("NCCL: rank %d of %d in %s", rank, size, name.c_str());
  *out = comm;
  return SUCCESS;
}
std::string hashed(const std::string& text) {
  char out[40];
  std::hash<std::string> hash;
  snprintf(out, sizeof out, "%016zx%016zx", hash(text), hash(text + "again"));
  return out;
}
Result start(Communicator** out, int size, int rank, int count, const UniqueId* ids) {
  std::string name = hashed(std::string((const char*)ids, sizeof(UniqueId) * count));
  use_context();
  int device = current_device();
  if (!group.depth) return join(out, name, size, rank, device);
  group.starts.push_back([=] { return join(out, name, size, rank, device); });
  *out = nullptr;
  return SUCCESS;
}
void await_calls(Communicator* comm) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  comm->changed.wait(lock, [&] {
    return !comm->is_running && (comm->turn == comm->launched || comm->shared.aborted);
  });
  lock.unlock();
  while (comm->graphs && !comm->shared.aborted) usleep(1000);  // since NCCL 2.26, and however long that is
}
}  // namespace

#define API extern "C" EXPORTED Result

API ncclGetVersion(int* out) {
  *out = NCCL_VERSION;
  return SUCCESS;
}
API ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  for (size_t i = 0; i < sizeof *id; i += sizeof(unsigned)) {
    unsigned number = random();
    memcpy(id->bytes + i, &number, sizeof number);
  }
  return SUCCESS;
}
API ncclCommInitRank(Communicator** out, int size, UniqueId id, int rank) { return start(out, size, rank, 1, &id); }
API ncclCommInitRankConfig(Communicator** out, int size, UniqueId id, int rank, void*) {
  return start(out, size, rank, 1, &id);
}
API ncclCommInitRankScalable(Communicator** out, int size, int rank, int count, UniqueId* ids, void*) {
  return start(out, size, rank, count, ids);
}
API ncclCommCount(Communicator* comm, int* out) {
  *out = comm->size;
  return SUCCESS;
}
API ncclCommUserRank(Communicator* comm, int* out) {
  *out = comm->rank;
  return SUCCESS;
}
API ncclCommCuDevice(Communicator* comm, int* out) {
  *out = comm->device;
  return SUCCESS;
}
API ncclCommGetAsyncError(Communicator* comm, int* out) {
  is_used_after_end(comm, "ncclCommGetAsyncError");
  *out = comm->error;
  return SUCCESS;
}
extern "C" EXPORTED const char* ncclGetLastError(Communicator* comm) {
  is_used_after_end(comm, "ncclGetLastError");
  return comm && !comm->error_text.empty() ? comm->error_text.c_str() : last_error.c_str();
}
extern "C" EXPORTED const char* ncclGetErrorString(int code) {
  static const char* texts[] = {"no error", "unhandled cuda error", "unhandled system error",
                                "internal error", "invalid argument", "invalid usage",
                                "remote process exited or there was a network error",
                                "NCCL operation in progress", "timeout"};
  return code >= 0 && code < 9 ? texts[code] : "unknown result code";
}
API ncclCommSplit(Communicator* comm, int color, int key, Communicator** out, void*) {
  *out = nullptr;
  if (is_used_after_end(comm, "ncclCommSplit")) return INVALID_USAGE;
  OnDevice guard(comm);
  if (comm->shared.aborted) return fail(INVALID_USAGE, "split of an aborted communicator");
  segment::Slot& mine = comm->shared.slot(comm->rank);
  mine.color = color;
  mine.key = key;
  if (!comm->shared.meet()) return INTERNAL_ERROR;
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < comm->size; rank++)
    if (comm->shared.slot(rank).color == color) members.push_back({comm->shared.slot(rank).key, rank});
  std::sort(members.begin(), members.end());
  if (!comm->shared.meet()) return INTERNAL_ERROR;  // all have read
  std::string name = comm->name + "split" + std::to_string(comm->splits++) + "color" + std::to_string(color);
  if (color < 0) return SUCCESS;
  int rank = int(std::find(members.begin(), members.end(), std::make_pair(key, comm->rank)) - members.begin());
  return join(out, hashed(name), int(members.size()), rank, comm->device);
}
API ncclCommShrink(Communicator* comm, int* excluded, int count, Communicator** out, void*, int flags) {
  *out = nullptr;
  if (is_used_after_end(comm, "ncclCommShrink")) return INVALID_USAGE;
  OnDevice guard(comm);
  if (flags & 1) comm->shared.aborted = true;  // NCCL_SHRINK_ABORT
  std::string name = comm->name + "shrink" + std::to_string(comm->children++);
  int rank = comm->rank;
  for (int i = 0; i < count; i++) {
    if (excluded[i] == comm->rank) return fail(INVALID_ARGUMENT, "shrink: this rank is one of the excluded");
    rank -= excluded[i] < comm->rank;
    name += "," + std::to_string(excluded[i]);
  }
  return join(out, hashed(name), comm->size - count, rank, comm->device);
}
API ncclCommFinalize(Communicator* comm) {
  if (is_used_after_end(comm, "ncclCommFinalize")) return INVALID_USAGE;
  OnDevice guard(comm);
  if (comm->shared.aborted) return fail(INVALID_USAGE, "finalize of an aborted communicator");
  await_calls(comm);
  return SUCCESS;
}
API ncclCommDestroy(Communicator* comm) {
  if (!comm || is_used_after_end(comm, "ncclCommDestroy")) return SUCCESS;
  OnDevice guard(comm);
  comm->has_ended = true;  // the object itself stays, because a graph may name it
  if (comm->shared.aborted) return SUCCESS;
  await_calls(comm);
  comm->shared.header->left++;
  int waited = 0;
  while (int(comm->shared.header->left.load()) < comm->size && !comm->shared.aborted) {  // a node's ranks leave together
    usleep(1000);
    if (++waited < DESTROY_MILLISECONDS) continue;
    say("NCCL: rank %d of %d has waited 10 s in ncclCommDestroy for the others and goes on", comm->rank, comm->size);
    break;
  }
  return SUCCESS;
}
API ncclCommAbort(Communicator* comm) {
  if (!comm) return SUCCESS;
  if (is_used_after_end(comm, "ncclCommAbort")) return INVALID_USAGE;
  OnDevice guard(comm);
  comm->has_ended = true;
  comm->shared.aborted = true;
  comm->shared.header->left++;
  std::unique_lock<std::mutex> lock(comm->mutex);
  comm->changed.notify_all();
  comm->changed.wait(lock, [&] { return !comm->is_running; });  // until its kernel has ended
  return SUCCESS;
}
API ncclCommRevoke(Communicator* comm, int) {
  comm->shared.aborted = true;
  return SUCCESS;
}
API ncclCommRegister(Communicator*, void* pointer, size_t, void** handle) {
  *handle = pointer;
  return SUCCESS;
}
API ncclCommDeregister(Communicator*, void*) { return SUCCESS; }
API ncclMemAlloc(void** out, size_t size) { return allocate(out, size) ? UNHANDLED_CUDA_ERROR : SUCCESS; }
API ncclMemFree(void* pointer) { return release(pointer) ? UNHANDLED_CUDA_ERROR : SUCCESS; }
API ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, Communicator* comm) {
  if (is_used_after_end(comm, "ncclRedOpCreatePreMulSum")) return INVALID_USAGE;
  bool is_on_host = residence == 1;  // ncclScalarHostImmediate
  auto* bytes = (char*)scalar;
  auto place = std::find_if(comm->factors.begin(), comm->factors.end(), [](auto& each) { return each.is_destroyed; });
  if (place == comm->factors.end()) place = comm->factors.insert(place, Factor{});
  *place = is_on_host ? Factor{{bytes, bytes + SIZES[type]}, nullptr} : Factor{{}, scalar};
  *op = PREDEFINED_OPS + int(place - comm->factors.begin());
  return SUCCESS;
}
API ncclRedOpDestroy(int op, Communicator* comm) {
  if (is_used_after_end(comm, "ncclRedOpDestroy")) return INVALID_USAGE;
  if (op < PREDEFINED_OPS || op >= PREDEFINED_OPS + int(comm->factors.size()))
    return fail(INVALID_ARGUMENT, "ncclRedOpDestroy: no such op");
  comm->factors[op - PREDEFINED_OPS].is_destroyed = true;
  return SUCCESS;
}

API ncclGroupStart() {
  group.depth++;
  return SUCCESS;
}
API ncclGroupEnd() {
  if (!group.depth) return fail(INVALID_USAGE, "ncclGroupEnd: not in a group call");
  if (--group.depth) return SUCCESS;
  Result result = SUCCESS;
  auto starts = std::move(group.starts);
  auto calls = std::move(group.calls);
  group.starts.clear();
  group.calls.clear();
  std::vector<std::thread> threads;
  std::vector<Result> results(starts.size(), SUCCESS);
  for (size_t i = 0; i < starts.size(); i++) threads.emplace_back([&, i] { results[i] = starts[i](); });
  for (std::thread& thread : threads) thread.join();
  for (Result each : results)
    if (each) result = each;
  std::vector<Communicator*> comms;
  for (const Call& call : calls)
    if (!std::count(comms.begin(), comms.end(), call.comm)) comms.push_back(call.comm);
  for (Communicator* comm : comms) {
    std::vector<Call> mine;
    for (const Call& call : calls)
      if (call.comm == comm) mine.push_back(call);
    if (Result each = submit(comm, mine)) result = each;
  }
  return result;
}
API ncclCommInitAll(Communicator** out, int size, const int* devices) {
  UniqueId id;
  ncclGetUniqueId(&id);
  int before = current_device();
  ncclGroupStart();
  for (int i = 0; i < size; i++) {
    set_device(devices ? devices[i] : i);
    start(&out[i], size, i, 1, &id);
  }
  set_device(before);
  return ncclGroupEnd();
}

// -- collectives and messages ----------------------------------------------------------------------
API ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, Communicator* comm, void* stream) {
  return take(ALL_REDUCE, false, send, recv, count, type, op, 0, comm, stream, 1, 1);
}
API ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root, Communicator* comm,
               void* stream) {
  return take(REDUCE, false, send, recv, count, type, op, root, comm, stream, 1, comm->rank == root);
}
API ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, Communicator* comm, void* stream) {
  return take(BROADCAST, false, send, recv, count, type, 0, root, comm, stream, comm->rank == root, 1);
}
API ncclBcast(void* buffer, size_t count, int type, int root, Communicator* comm, void* stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
API ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, Communicator* comm, void* stream) {
  return take(REDUCE_SCATTER, false, send, recv, count, type, op, 0, comm, stream, comm->size, 1);
}
API ncclAllGather(const void* send, void* recv, size_t count, int type, Communicator* comm, void* stream) {
  return take(ALL_GATHER, false, send, recv, count, type, 0, 0, comm, stream, 1, comm->size);
}
API ncclAlltoAll(const void* send, void* recv, size_t count, int type, Communicator* comm, void* stream) {
  if (send == recv && count) return fail(INVALID_ARGUMENT, "ncclAlltoAll is not in place");
  return take(ALL_TO_ALL, false, send, recv, count, type, 0, 0, comm, stream, comm->size, comm->size);
}
API ncclGather(const void* send, void* recv, size_t count, int type, int root, Communicator* comm, void* stream) {
  return take(GATHER, false, send, recv, count, type, 0, root, comm, stream, 1, comm->rank == root ? comm->size : 0);
}
API ncclScatter(const void* send, void* recv, size_t count, int type, int root, Communicator* comm, void* stream) {
  return take(SCATTER, false, send, recv, count, type, 0, root, comm, stream, comm->rank == root ? comm->size : 0, 1);
}
API ncclSend(const void* data, size_t count, int type, int peer, Communicator* comm, void* stream) {
  return take(SEND, true, data, nullptr, count, type, 0, peer, comm, stream, 1, 0);
}
API ncclRecv(void* data, size_t count, int type, int peer, Communicator* comm, void* stream) {
  return take(SEND, false, nullptr, data, count, type, 0, peer, comm, stream, 0, 1);
}
