// Bytes between the processes of one machine.
#include "segment.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace segment {
static void pause(int& idle) {
  if (++idle < 64)
    sched_yield();
  else
    usleep(idle < 1000 ? 20 : 500);
}
template <class F>
bool Segment::until(F&& condition) {
  for (int idle = 0; !condition();) {
    if (aborted) return false;
    pause(idle);
  }
  return true;
}

bool Segment::open(const std::string& name, const unsigned char* uuid) {
  size_t bytes = sizeof(Header) + sizeof(Ring) * size * size + 64;
  std::string path = "/emulated-nccl-" + name;
  int file = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0) return false;
  bool is_sized = !ftruncate(file, off_t(bytes));
  void* base = is_sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (base == MAP_FAILED) return false;
  header = (Header*)base;
  rings = (Ring*)((char*)base + (sizeof(Header) + 63) / 64 * 64);
  memcpy(slot(rank).uuid, uuid, 16);
  header->arrived++;
  until([&] { return int(header->arrived.load()) >= size; });
  if (int(++header->mapped) == size) shm_unlink(path.c_str());  // so that a killed job leaves nothing
  return true;
}
bool Segment::meet() {
  uint64_t number = ++meetings;
  slot(rank).meetings = number;
  return until([&] {
    for (int each = 0; each < size; each++)
      if (slot(each).meetings < number) return false;
    return true;
  });
}
int Segment::first_sharing(int* other) const {
  for (int rank = 0; rank < size; rank++)
    for (*other = 0; *other < rank; ++*other)
      if (!memcmp(header->slots[rank].uuid, header->slots[*other].uuid, 16)) return rank;
  return -1;
}

// Move what fits now; return whether anything moved.
bool Segment::step(Transfer& transfer) {
  bool moved = false;
  for (;;) {
    bool announces = transfer.announced < sizeof(Announcement);
    auto* announcement = (char*)(transfer.sends ? &transfer.expected : &transfer.received);
    char* base = announces ? announcement : transfer.data;
    size_t& at = announces ? transfer.announced : transfer.done;
    size_t wanted = (announces ? sizeof(Announcement) : transfer.bytes) - at;
    if (!wanted) return moved;
    Ring& way = transfer.sends ? ring(rank, transfer.peer) : ring(transfer.peer, rank);
    uint64_t written = way.written.load(std::memory_order_acquire), read = way.read.load(std::memory_order_acquire);
    size_t room = transfer.sends ? RING_BYTES - (written - read) : written - read;
    size_t offset = (transfer.sends ? written : read) % RING_BYTES;
    size_t count = std::min({wanted, room, RING_BYTES - offset});
    if (!count) return moved;
    if (transfer.sends) {
      memcpy(way.bytes + offset, base + at, count);
      way.written.store(written + count, std::memory_order_release);
    } else {
      memcpy(base + at, way.bytes + offset, count);
      way.read.store(read + count, std::memory_order_release);
    }
    at += count;
    moved = true;
    bool is_told = !transfer.sends && announces && transfer.announced == sizeof(Announcement);
    if (is_told && memcmp(&transfer.received, &transfer.expected, sizeof(Announcement))) {
      mismatched = &transfer;
      return moved;
    }
  }
}

bool Segment::carry_out(std::vector<Transfer>& transfers) {
  std::vector<char> is_busy(2 * size);  // messages to and from one peer go one after another
  for (int idle = 0;;) {
    bool moved = false, is_left = false;
    std::fill(is_busy.begin(), is_busy.end(), 0);
    for (Transfer& transfer : transfers) {
      if (transfer.done == transfer.bytes && transfer.announced == sizeof(Announcement)) continue;
      is_left = true;
      char& busy = is_busy[2 * transfer.peer + transfer.sends];
      if (busy) continue;
      busy = 1;
      moved |= step(transfer);
      if (mismatched) return false;
    }
    if (!is_left) return true;
    if (aborted) return false;
    if (moved)
      idle = 0;
    else
      pause(idle);
  }
}
}  // namespace segment
