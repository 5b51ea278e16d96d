// A plan in use while its file is read ahead or moved into huge pages: the bytes are right at every
// moment, and a file that is cut short meanwhile is an error.
//
// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>

#include "driver.h"
#include "status.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

// Lets so many calls begin; the next one waits.
class Gate {
 public:
  void Allow(size_t num_calls) {
    std::lock_guard<std::mutex> lock(mutex_);
    allowed_ = num_calls;
    changed_.notify_all();
  }
  void Open() { Allow(SIZE_MAX); }
  // Of the call that wants to begin.
  void Pass(size_t offset) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    offsets_.push_back(offset);
    changed_.notify_all();
    changed_.wait(lock, [this] { return allowed_ > 0; });
    if (allowed_ != SIZE_MAX) --allowed_;
  }
  // Until so many calls have come since Reset, waiting ones included.
  void AwaitArrivals(size_t num_calls) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= num_calls; });
  }
  void Reset(size_t num_allowed) {
    std::lock_guard<std::mutex> lock(mutex_);
    arrived_ = 0;
    allowed_ = num_allowed;
    offsets_.clear();
  }
  std::vector<size_t> offsets() {  // of the calls since Reset
    std::lock_guard<std::mutex> lock(mutex_);
    return offsets_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t allowed_ = SIZE_MAX, arrived_ = 0;
  std::vector<size_t> offsets_;
};
Gate populating, reading;  // in the order in which a prefetch has them

std::atomic<size_t> most_bytes{SIZE_MAX};  // of one read
std::atomic<bool> mremap_fails{false};     // after it took the old pages away
std::atomic<int> populate_error{0};        // of madvise to populate; 0 = it works
std::atomic<bool> maps_huge_pages{false};  // the file system does, of every file
constexpr int kPopulateRead = 22;

}  // namespace

// In place of the C library's, for all of this program.
extern "C" ssize_t pread(int fd, void* to, size_t n, off_t at) {
  reading.Pass(static_cast<size_t>(at));
  return syscall(SYS_pread64, fd, to, std::min(n, most_bytes.load()), at);
}
extern "C" int madvise(void* address, size_t bytes, int advice) noexcept {
  if (advice == kPopulateRead) {
    populating.Pass(0);
    if (populate_error != 0) {
      errno = populate_error;
      return -1;
    }
  }
  return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}
// Of /proc/self/pagemap, whether a range is in huge pages.
extern "C" int ioctl(int, unsigned long request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  uint64_t* const scan = va_arg(arguments, uint64_t*);
  va_end(arguments);
  if (!maps_huge_pages) {
    errno = ENOTTY;  // an older Linux
    return -1;
  }
  uint64_t* const found = reinterpret_cast<uint64_t*>(scan[5]);
  found[0] = scan[2];
  found[1] = scan[3];
  return 1;
}
extern "C" void* mremap(void* from, size_t bytes, size_t to_bytes, int flags, ...) noexcept {
  va_list arguments;
  va_start(arguments, flags);
  void* to = va_arg(arguments, void*);
  va_end(arguments);
  if (mremap_fails) {
    munmap(to, to_bytes);
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mremap, from, bytes, to_bytes, flags, to));
}

namespace {

bool HugePagesOffered() {
  std::string text;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), text);
  return text.find("[madvise]") != std::string::npos || text.find("[always]") != std::string::npos;
}

// More than three pieces of 8 MiB, with a tail that fills no page.
TinyShape LargeShape() {
  TinyShape shape;
  shape.vocab = 8009;
  shape.hidden = 1000;
  shape.inner = 120;
  return shape;
}

struct LargeFile {
  LargeFile() {
    TinyModel model(LargeShape());
    bytes = model.plan.Bytes();
    CHECK(bytes.size() > 3 * (8u << 20));
    file.Write(bytes);
  }
  TempFile file;
  std::vector<uint8_t> bytes;
};

bool IsSame(const Plan& plan, const std::vector<uint8_t>& bytes) {
  return memcmp(plan.at(0), bytes.data(), bytes.size()) == 0;
}

void AwaitEnd(const Plan& plan) {
  while (!plan.prefetch()->is_done()) std::this_thread::yield();
}

void OpenGates() {
  populating.Reset(SIZE_MAX);
  reading.Reset(SIZE_MAX);
}

// Threads of this process that bring plans into memory.
int NumPrefetching() {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  CHECK(tasks != nullptr);
  while (const dirent* entry = readdir(tasks)) {
    std::string name;
    std::getline(std::ifstream(std::string("/proc/self/task/") + entry->d_name + "/comm"), name);
    count += name == "psm-prefetch";
  }
  closedir(tasks);
  return count;
}

// Lines of /proc/self/maps, those whose text has `part`.
int NumMappings(const std::string& part = "") {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(part) != std::string::npos;
  return count;
}

// A field of the mapping at `address`, in KiB, as /proc/self/smaps has it; of all that begin in
// [address, address + bytes).
size_t SmapsKib(const void* address, size_t bytes, const std::string& field) {
  std::ifstream smaps("/proc/self/smaps");
  const uintptr_t from = reinterpret_cast<uintptr_t>(address);
  bool is_ours = false;
  size_t sum = 0;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long begin = 0, end = 0;
    if (sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      is_ours = begin >= from && begin < from + bytes;
    } else if (is_ours && line.compare(0, field.size(), field) == 0) {
      sum += strtoull(line.c_str() + field.size(), nullptr, 10);
    }
  }
  return sum;
}

// Every piece is the whole of some huge pages, each byte is in one, and the order is kept.
void CheckPieces() {
  const size_t page = kHugePageBytes, bytes = 10 * page + 77;
  const std::vector<ByteRange> order = {
      {0, 100}, {6 * page + 5, 8 * page + 1}, {3 * page, 3 * page + 1}, {7 * page, 9 * page}};
  const auto pieces = PiecesInOrder(order, bytes, 2 * page);
  std::vector<size_t> begins;
  size_t sum = 0;
  for (const ByteRange& piece : pieces) {
    CHECK(piece.begin % page == 0 && piece.begin < piece.end && piece.end <= bytes);
    CHECK(piece.end % page == 0 || piece.end == bytes);
    CHECK(piece.end - piece.begin <= 2 * page);
    begins.push_back(piece.begin / page);
    sum += piece.end - piece.begin;
  }
  CHECK(sum == bytes);
  CHECK((begins == std::vector<size_t>{0, 6, 8, 3, 1, 4, 9}));
  CHECK(PiecesInOrder({}, 5, page).size() == 1);
  CHECK(PiecesInOrder({{0, 9 * page}}, page, page).size() == 1);  // beyond the end: of no file
}

// Embeddings are read last, for a step reads a few rows of them; those that are the last product's
// weight, too, when that is due.
void CheckOrder(const LargeFile& large) {
  OpenGates();
  const auto plan = Plan::Open(large.file.path(), WeightsIn::kMapped);
  const std::vector<ByteRange> order = OrderOfUse(*plan);
  CHECK(order.front().begin == 0 && order.front().end == plan->header().data_offset);
  uint32_t embedding = 0;
  for (uint32_t i = 0; i < plan->header().num_ops; ++i) {
    if (plan->op(i).code == kOpEmbed) embedding = static_cast<uint32_t>(plan->op(i).tensors[0]);
  }
  CHECK(order.back().begin == plan->tensor(embedding).data_offset);
  size_t op_data = order[1].begin;  // of the first op that is not the embedding
  for (uint32_t i = 0; i < plan->header().num_ops; ++i) {
    const OpRecord& op = plan->op(i);
    if (op.code == kOpEmbed || op.tensors[0] < 0) continue;
    CHECK(op_data == plan->tensor(static_cast<size_t>(op.tensors[0])).data_offset);
    break;
  }
}

// Threads compare all of the plan with the file while its pieces move, one by one.
void CheckMoving(const LargeFile& large) {
  OpenGates();
  reading.Reset(0);
  const auto plan = Plan::Open(large.file.path(), WeightsIn::kAuto);
  CHECK(!plan->in_huge_pages() && NumMappings(large.file.path()) == 1);
  CHECK(reinterpret_cast<uintptr_t>(plan->at(0)) % kHugePageBytes == 0);
  CHECK(IsSame(*plan, large.bytes));
  std::atomic<bool> ends{false};
  std::atomic<size_t> num_rounds{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      do {
        CHECK(IsSame(*plan, large.bytes));
        ++num_rounds;
      } while (!ends);
    });
  }
  for (size_t piece = 1; !plan->prefetch()->is_done(); ++piece) {
    reading.Allow(1);
    const size_t before = num_rounds;
    while (num_rounds < before + 4) std::this_thread::yield();
  }
  ends = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(plan->in_huge_pages() && plan->prefetch()->moved_bytes() == large.bytes.size());
  CHECK(NumMappings(large.file.path()) == 0);
  const std::vector<size_t> offsets = reading.offsets();
  CHECK(offsets.size() >= 4 && offsets[0] == 0);
  CHECK(!std::is_sorted(offsets.begin(), offsets.end()));  // the rest of the embeddings came last
  CHECK(IsSame(*plan, large.bytes));
}

// All whole huge pages of the file are ones, in one or two mappings: nothing is left in pieces.
void CheckHugePages(const LargeFile& large) {
  OpenGates();
  most_bytes = 100003;
  const int before = NumMappings();
  const auto plan = Plan::Open(large.file.path(), WeightsIn::kAuto);
  AwaitEnd(*plan);
  most_bytes = SIZE_MAX;
  CHECK(plan->in_huge_pages() && IsSame(*plan, large.bytes));
  const size_t whole = large.bytes.size() / kHugePageBytes * kHugePageBytes;
  const size_t huge = SmapsKib(plan->at(0), large.bytes.size(), "AnonHugePages:") << 10;
  printf("%zu of %zu bytes in huge pages, %d mappings more\n", huge, whole, NumMappings() - before);
  // How many it gives is the system's affair, which may have none in a piece.
  CHECK(huge % kHugePageBytes == 0 && huge <= whole);
  if (getenv("PLANSMITH_TEST_HUGE_PAGES") != nullptr) CHECK(huge == whole);
}

// Of every state between, closing waits for the piece at hand and leaves nothing mapped.
void CheckClosing(const LargeFile& large) {
  for (const bool is_read : {false, true}) {
    Gate& gate = is_read ? reading : populating;
    for (size_t num_pieces = 0; num_pieces < 4; ++num_pieces) {
      const int before = NumMappings(large.file.path());
      OpenGates();
      gate.Reset(num_pieces);
      auto plan = Plan::Open(large.file.path(), is_read ? WeightsIn::kAuto : WeightsIn::kMapped);
      gate.AwaitArrivals(num_pieces + 1);
      const uint8_t* base = plan->at(0);
      std::thread opens([&gate] { gate.Open(); });
      plan.reset();
      opens.join();
      CHECK(NumMappings(large.file.path()) == before);
      unsigned char resident;
      CHECK(mincore(const_cast<uint8_t*>(base), 1, &resident) == -1 && errno == ENOMEM);
    }
  }
}

// What the file system has in huge pages stays the file's: nothing is read and nothing moves.
void CheckKept(const LargeFile& large) {
  OpenGates();
  maps_huge_pages = true;
  const auto plan = Plan::Open(large.file.path(), WeightsIn::kAuto);
  AwaitEnd(*plan);
  maps_huge_pages = false;
  const size_t tail = large.bytes.size() % kHugePageBytes;
  CHECK(plan->prefetch()->kept_bytes() + plan->prefetch()->moved_bytes() == large.bytes.size());
  CHECK(plan->prefetch()->moved_bytes() <= tail && reading.offsets().size() <= 1);
  CHECK(plan->in_huge_pages() && IsSame(*plan, large.bytes));
}

// Why a plan is lost; empty while it is not.
std::string WhyLost(const Plan& plan) {
  try {
    plan.ThrowIfLost();
    return "";
  } catch (const plansmith::StatusError& e) {
    CHECK(e.code() == PSM_ERROR_ENGINE_FILE);
    return e.what();
  }
}

// The file is cut while pieces move: what was moved stays, the rest reads as zeros instead of
// ending the process, and every use of the plan is told.
void CheckCut() {
  for (const bool is_moved : {true, false}) {
    const LargeFile large;
    const std::string& path = large.file.path();
    OpenGates();
    Gate& gate = is_moved ? reading : populating;
    gate.Reset(1);
    const auto plan = Plan::Open(path, is_moved ? WeightsIn::kAuto : WeightsIn::kMapped);
    gate.AwaitArrivals(2);
    CHECK(WhyLost(*plan).empty());
    const size_t at = 12u << 20;
    CHECK(truncate(path.c_str(), at) == 0);
    gate.Open();
    AwaitEnd(*plan);
    const std::string why = WhyLost(*plan);
    CHECK(why.find(path) != std::string::npos);
    CHECK(why.find("ends at byte 12582912, it had " + std::to_string(large.bytes.size())) !=
          std::string::npos);
    CHECK(why.find("it was cut while it was read; rebuild the engine") != std::string::npos);
    size_t num_nonzero = 0;
    for (size_t i = at; i < large.bytes.size(); ++i) num_nonzero += plan->at(0)[i] != 0;
    const size_t moved = plan->prefetch()->moved_bytes();
    CHECK(is_moved ? moved > 0 && !plan->in_huge_pages() : moved == 0 && num_nonzero == 0);
    CHECK(memcmp(plan->at(0), large.bytes.data(), plan->header().data_offset) == 0);
    if (is_moved) CHECK(memcmp(plan->at(0), large.bytes.data(), kHugePageBytes) == 0);
  }
}

// Through the executor: steps give the same logits as ever, then the error and nothing else.
void CheckSteps() {
  const LargeFile large;
  std::vector<Driver::Sequence> sequences(1);
  const auto run = [&](Driver* driver) {
    sequences.assign(1, {});
    sequences[0].ids = {1, 2, 3, 4, 5, 6};
    driver->Step(&sequences, {4});
    driver->Step(&sequences, {2});
    const auto logits = sequences[0].logits;
    driver->Free(&sequences[0]);
    return logits;
  };
  OpenGates();
  auto first = std::make_unique<Driver>(large.file.path(), nullptr, 2, 8);
  const auto wanted = run(first.get());
  first.reset();
  reading.Reset(1);
  Driver driver(large.file.path(), nullptr, 2, 8);
  reading.AwaitArrivals(2);
  CHECK(NumPrefetching() == 1);
  CHECK(run(&driver) == wanted);
  reading.Allow(1);
  CHECK(run(&driver) == wanted);
  CHECK(truncate(large.file.path().c_str(), 12u << 20) == 0);
  reading.Open();
  const int32_t id = 1, position = 0, length = 1, cu[] = {0, 1}, row = 0;
  const std::vector<int32_t> table(64, 0);
  psm_batch batch = {};
  batch.struct_size = PSM_BATCH_SIZE;
  batch.num_tokens = batch.num_seqs = batch.num_logits_rows = 1;
  batch.block_table_stride = (driver.info.max_seq_len - 1) / driver.info.tokens_per_block + 1;
  batch.input_ids = &id;
  batch.position_ids = &position;
  batch.query_lens = batch.kv_lens = &length;
  batch.cu_query_lens = cu;
  batch.block_table = table.data();
  batch.logits_rows = &row;
  const float* logits = reinterpret_cast<const float*>(&row);
  // Not before the thread that copies has seen it: a step that reads there first gets a bus error.
  while (NumPrefetching() > 0) std::this_thread::yield();
  CHECK(driver.executor.step(driver.executor.self, &batch, &logits) == PSM_ERROR_ENGINE_FILE);
  CHECK(logits == nullptr);
  CHECK(strstr(psm_last_error(), "it was cut while it was read") != nullptr);
}

// Whatever the kernel refuses, the mapping stays and is right.
void CheckRefusals(const LargeFile& large) {
  OpenGates();
  mremap_fails = true;
  {
    const auto plan = Plan::Open(large.file.path(), WeightsIn::kAuto);
    AwaitEnd(*plan);
    CHECK(!plan->in_huge_pages() && plan->prefetch()->moved_bytes() == 0);
    CHECK(IsSame(*plan, large.bytes) && WhyLost(*plan).empty());
  }
  mremap_fails = false;
  for (const int error : {EINVAL, ENOMEM}) {  // an older Linux; no memory
    populate_error = error;
    const auto plan = Plan::Open(large.file.path(), WeightsIn::kMapped);
    AwaitEnd(*plan);
    CHECK(IsSame(*plan, large.bytes) && WhyLost(*plan).empty());
  }
  populate_error = EFAULT;  // the disk's, for the file is whole
  const auto plan = Plan::Open(large.file.path(), WeightsIn::kMapped);
  AwaitEnd(*plan);
  CHECK(WhyLost(*plan).find(strerror(EIO)) != std::string::npos);
  populate_error = 0;
}

// Read before it is open, or too small for a huge page: there is nothing to do behind it.
void CheckNothingToDo(const LargeFile& large) {
  OpenGates();
  if (HugePagesOffered()) {
    const auto plan = Plan::Open(large.file.path(), WeightsIn::kHugePages);
    CHECK(plan->prefetch() == nullptr && plan->in_huge_pages() && IsSame(*plan, large.bytes));
  }
  TinyModel model{TinyShape()};
  const std::vector<uint8_t> bytes = model.plan.Bytes();
  CHECK(bytes.size() < kHugePageBytes);
  const TempFile file;
  file.Write(bytes);
  const auto plan = Plan::Open(file.path(), WeightsIn::kAuto);
  CHECK(plan->prefetch() == nullptr && !plan->in_huge_pages() && IsSame(*plan, bytes));
}

}  // namespace

int main() {
  CheckPieces();
  const LargeFile large;
  CheckOrder(large);
  CheckNothingToDo(large);
  CheckRefusals(large);
  if (!HugePagesOffered()) return 0;
  CheckClosing(large);
  CheckKept(large);
  CheckMoving(large);
  CheckHugePages(large);
  CheckCut();
  CheckSteps();
  return 0;
}
