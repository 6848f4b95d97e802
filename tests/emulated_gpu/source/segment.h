// Shared memory of one communicator: a ring of bytes for each ordered pair of ranks, and a slot for each rank.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace segment {
constexpr size_t RING_BYTES = 1 << 18;
constexpr int MOST_RANKS = 64;

struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char bytes[RING_BYTES];
};
struct Slot {
  std::atomic<uint64_t> meetings;  // how many meetings of all ranks this one has come to
  int color, key;                  // of a split
  unsigned char uuid[16];          // of the rank's GPU
};
struct Header {
  std::atomic<uint32_t> arrived, mapped, left;
  Slot slots[MOST_RANKS];
};

// What precedes the data of a transfer: both sides must have made the same call.
struct Announcement {
  uint32_t call;  // the kind, and the root above its eighth bit
  uint32_t type;
  uint64_t bytes;
};
struct Transfer {
  bool sends;
  int peer;
  char* data;
  size_t bytes;
  Announcement expected;
  size_t done = 0, announced = 0;
  Announcement received{};
};

class Segment {
 public:
  Segment(int rank, int size) : rank(rank), size(size) {}
  bool open(const std::string& name, const unsigned char* uuid);  // blocks until all ranks are here
  bool meet();                                                     // the same; false if aborted meanwhile
  bool carry_out(std::vector<Transfer>& transfers);                // false if aborted, or if the calls do not match
  int first_sharing(int* other) const;                             // a rank that is on another's GPU, or -1
  Slot& slot(int of) { return header->slots[of]; }
  Header* header = nullptr;
  std::atomic<bool> aborted{false};
  const Transfer* mismatched = nullptr;  // the transfer whose sides differ

 private:
  template <class F>
  bool until(F&& condition);
  bool step(Transfer& transfer);
  Ring& ring(int from, int to) { return rings[from * size + to]; }
  int rank, size;
  uint64_t meetings = 0;
  Ring* rings = nullptr;
};
}  // namespace segment
