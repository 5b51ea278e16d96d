// The TensorRT side of plansmith::PagedAttention: types, shapes, launches. See plugin.h.

#include "plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace plansmith {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

enum Input { kQ, kK, kV, kKPool, kVPool, kCuQueryLens, kKvLens, kBlockTable, kKScale, kVScale };
enum Output { kOut, kKPoolOut, kVPoolOut };
constexpr int32_t kPlainInputs = 8, kScaledInputs = 10, kOutputs = 3;
constexpr std::array<const char*, kScaledInputs> kInputNames = {
    "q",       "k",           "v",       "k_pool", "v_pool", "cu_query_lens",
    "kv_lens", "block_table", "k_scale", "v_scale"};
constexpr size_t kAlignment = 256;  // of pieces of workspace, as of everything that TensorRT gives

nvinfer1::ILogger* g_logger = nullptr;
thread_local std::string t_last_error;

void Report(const std::exception& error) {
  t_last_error = error.what();
  if (g_logger != nullptr) {
    g_logger->log(nvinfer1::ILogger::Severity::kERROR,
                  ("plansmith::PagedAttention: " + t_last_error).c_str());
  }
}

// Runs a body; what it throws is reported and `failed` returned.
template <typename T, typename Body>
T Guarded(T failed, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    try {
      Report(error);
    } catch (...) {
    }
    return failed;
  }
}

void Check(CUresult code, const char* call) {
  if (code != CUDA_SUCCESS)
    throw PluginError(std::string(call) + " gives CUDA error " + std::to_string(code));
}

bool IsScaled(DataType pool) { return pool == DataType::kFP8 || pool == DataType::kINT8; }

// Whether types 0..pos go together; those behind pos may be anything yet.
bool TypesFit(int32_t pos, const std::vector<DataType>& types, int32_t num_inputs) {
  const DataType type = types[pos];
  if (pos >= num_inputs) {
    const int32_t output = pos - num_inputs;
    return type == types[output == kOut ? kQ : output == kKPoolOut ? kKPool : kVPool];
  }
  switch (pos) {
    case kQ:
      return type == DataType::kHALF || type == DataType::kBF16;
    case kK:
    case kV:
      return type == types[kQ];
    case kKPool:
      return num_inputs == kScaledInputs ? IsScaled(type) : type == types[kQ];
    case kVPool:
      return type == types[kKPool];
    case kKScale:
    case kVScale:
      return type == DataType::kFLOAT;
    default:
      return type == DataType::kINT32;
  }
}

uint32_t GridSize(const Formula& formula, const StepDims& dims) {
  const int64_t size = formula.At(dims);
  if (size < 0 || size > 0x7fffffff)
    throw PluginError("a grid of " + std::to_string(size) + " programs");
  return static_cast<uint32_t>(size);
}

size_t PieceBytes(const KernelList::Piece& piece, const StepDims& dims) {
  const int64_t bytes = piece.bytes.At(dims);
  if (bytes < 0)
    throw PluginError("workspace " + piece.name + " of " + std::to_string(bytes) + " bytes");
  return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

bool IsPointer(const std::string& name, const KernelList& list) {
  const auto named = [&](const char* input) { return name == input; };
  const auto piece = [&](const KernelList::Piece& one) { return name == one.name; };
  return name == "out" || std::any_of(kInputNames.begin(), kInputNames.end(), named) ||
         std::any_of(list.workspace.begin(), list.workspace.end(), piece);
}

std::mutex g_driver_mutex;
Driver g_driver{};

template <typename F>
void Find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr)
    throw PluginError(std::string("the NVIDIA driver has no ") + name + "; update it");
}

}  // namespace

const Driver& Driver::Get() {
  const std::lock_guard<std::mutex> lock(g_driver_mutex);
  if (g_driver.launch_kernel != nullptr) return g_driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw PluginError("there is no NVIDIA driver (libcuda.so.1)");
  Driver found{};
  Find(library, "cuLibraryLoadData", &found.library_load);
  Find(library, "cuLibraryUnload", &found.library_unload);
  Find(library, "cuLibraryGetKernel", &found.library_get_kernel);
  Find(library, "cuKernelSetAttribute", &found.kernel_set_attribute);
  Find(library, "cuCtxGetDevice", &found.ctx_get_device);
  Find(library, "cuLaunchKernel", &found.launch_kernel);
  g_driver = found;
  return g_driver;
}

void Driver::Set(const Driver& driver) {
  const std::lock_guard<std::mutex> lock(g_driver_mutex);
  g_driver = driver;
}

LoadedKernels::LoadedKernels(const KernelList& list) {
  const Driver& driver = Driver::Get();
  CUdevice device = 0;
  Check(driver.ctx_get_device(&device), "cuCtxGetDevice");
  try {
    for (const KernelImage& one : list.kernels) {
      CUlibrary library = nullptr;
      Check(driver.library_load(&library, one.image.c_str(), nullptr, nullptr, 0, nullptr, nullptr,
                                0),
            ("cuLibraryLoadData of " + one.name).c_str());
      libraries_.push_back(library);
      CUkernel kernel = nullptr;
      Check(driver.library_get_kernel(&kernel, library, one.symbol.c_str()), "cuLibraryGetKernel");
      Check(driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        static_cast<int>(one.shared_bytes), kernel, device),
            "cuKernelSetAttribute (shared memory)");
      kernels_.push_back(kernel);
    }
  } catch (...) {
    for (CUlibrary library : libraries_) driver.library_unload(library);
    throw;
  }
}

LoadedKernels::~LoadedKernels() {
  for (CUlibrary library : libraries_) Driver::Get().library_unload(library);
}

PagedAttentionPlugin::PagedAttentionPlugin(Fields fields)
    : fields_(std::move(fields)), list_(KernelList::Parse(fields_.kernels)) {
  for (const KernelImage& kernel : list_.kernels) {
    for (const Argument& argument : kernel.arguments) {
      if (argument.number.empty() && !IsPointer(argument.pointer, list_)) {
        throw PluginError("kernel " + kernel.name + " takes '" + argument.pointer +
                          "', which is neither a tensor of the op nor workspace");
      }
    }
  }
}

nvinfer1::IPluginCapability* PagedAttentionPlugin::getCapabilityInterface(
    nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::v_2_0::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* PagedAttentionPlugin::clone() noexcept {
  return Guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
    auto copy = std::make_unique<PagedAttentionPlugin>(fields_);
    copy->loaded_ = loaded_;
    return copy.release();
  });
}

int32_t PagedAttentionPlugin::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in,
                                              int32_t num_inputs,
                                              const nvinfer1::DynamicPluginTensorDesc*,
                                              int32_t) noexcept {
  return Guarded(-1, [&] {
    std::vector<Dims> dims;
    for (int32_t n = 0; n < num_inputs; ++n) dims.push_back(in[n].desc.dims);
    CheckShapes(dims.data(), num_inputs);
    return 0;
  });
}

int32_t PagedAttentionPlugin::getOutputDataTypes(DataType* out, int32_t num_outputs,
                                                 const DataType* in,
                                                 int32_t num_inputs) const noexcept {
  return Guarded(-1, [&] {
    if (num_outputs != kOutputs || (num_inputs != kPlainInputs && num_inputs != kScaledInputs)) {
      throw PluginError(std::to_string(num_inputs) + " inputs and " + std::to_string(num_outputs) +
                        " outputs; it takes 8, or 10 with quantized pools, and gives 3");
    }
    out[kOut] = in[kQ];
    out[kKPoolOut] = in[kKPool];
    out[kVPoolOut] = in[kVPool];
    return 0;
  });
}

int32_t PagedAttentionPlugin::getOutputShapes(const DimsExprs* in, int32_t, const DimsExprs*,
                                              int32_t, DimsExprs* out, int32_t,
                                              nvinfer1::IExprBuilder&) noexcept {
  out[kOut] = in[kQ];
  out[kKPoolOut] = in[kKPool];
  out[kVPoolOut] = in[kVPool];
  return 0;
}

bool PagedAttentionPlugin::supportsFormatCombination(
    int32_t pos, const nvinfer1::DynamicPluginTensorDesc* in_out, int32_t num_inputs,
    int32_t num_outputs) noexcept {
  return Guarded(false, [&] {
    if (num_outputs != kOutputs || (num_inputs != kPlainInputs && num_inputs != kScaledInputs))
      return false;
    std::vector<DataType> types;
    for (int32_t n = 0; n <= pos; ++n) types.push_back(in_out[n].desc.type);
    return in_out[pos].desc.format == nvinfer1::TensorFormat::kLINEAR &&
           TypesFit(pos, types, num_inputs);
  });
}

size_t PagedAttentionPlugin::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in,
                                              int32_t num_inputs,
                                              const nvinfer1::DynamicPluginTensorDesc*,
                                              int32_t) const noexcept {
  return Guarded(size_t{0}, [&] {
    if (num_inputs <= kBlockTable) throw PluginError("too few inputs");
    const Dims& table = in[kBlockTable].max;
    const StepDims most{in[kQ].max.d[0], table.d[0], table.d[1], in[kKPool].max.d[0]};
    size_t bytes = 0;
    for (const KernelList::Piece& piece : list_.workspace) bytes += PieceBytes(piece, most);
    return bytes;
  });
}

int32_t PagedAttentionPlugin::getAliasedInput(int32_t output_idx) noexcept {
  return output_idx == kKPoolOut ? kKPool : output_idx == kVPoolOut ? kVPool : -1;
}

int32_t PagedAttentionPlugin::onShapeChange(const nvinfer1::PluginTensorDesc* in,
                                            int32_t num_inputs, const nvinfer1::PluginTensorDesc*,
                                            int32_t) noexcept {
  return Guarded(-1, [&] {
    std::vector<Dims> dims;
    for (int32_t n = 0; n < num_inputs; ++n) dims.push_back(in[n].dims);
    CheckShapes(dims.data(), num_inputs);
    return 0;
  });
}

void PagedAttentionPlugin::CheckShapes(const Dims* dims, int32_t num_inputs) const {
  if (num_inputs != kPlainInputs && num_inputs != kScaledInputs) {
    throw PluginError(std::to_string(num_inputs) +
                      " inputs; it takes 8, or 10 with quantized pools");
  }
  const auto check = [&](Input input, std::initializer_list<int64_t> wanted) {
    const Dims& got = dims[input];
    bool fits = got.nbDims == static_cast<int32_t>(wanted.size());
    for (int32_t n = 0; fits && n < got.nbDims; ++n) {
      const int64_t want = wanted.begin()[n];
      fits = want == -1 || got.d[n] == -1 || got.d[n] == want;
    }
    if (fits) return;
    const auto text = [](const int64_t* d, size_t count) {
      std::string listed = "[";
      for (size_t n = 0; n < count; ++n) listed += (n ? ", " : "") + std::to_string(d[n]);
      return listed + "]";
    };
    throw PluginError(std::string(kInputNames[input]) + " is " +
                      text(got.d, static_cast<size_t>(std::max(0, got.nbDims))) + ", it must be " +
                      text(wanted.begin(), wanted.size()) + " (-1 = any)");
  };
  const int64_t width = int64_t{fields_.num_heads} * fields_.head_dim;
  const int64_t kv_width = int64_t{fields_.kv_num_heads} * fields_.head_dim;
  check(kQ, {-1, width});
  check(kK, {-1, kv_width});
  check(kV, {-1, kv_width});
  for (Input pool : {kKPool, kVPool}) check(pool, {-1, fields_.kv_num_heads, -1, fields_.head_dim});
  const int64_t batch = dims[kKvLens].nbDims == 1 ? dims[kKvLens].d[0] : -1;
  check(kKvLens, {-1});
  check(kCuQueryLens, {batch == -1 ? -1 : batch + 1});
  check(kBlockTable, {batch, -1});
  for (int32_t scale = kKScale; scale < num_inputs; ++scale) check(static_cast<Input>(scale), {});
}

int32_t PagedAttentionPlugin::enqueue(const nvinfer1::PluginTensorDesc* in,
                                      const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                                      void* const* outputs, void* workspace,
                                      cudaStream_t stream) noexcept {
  return Guarded(-1, [&] {
    if (loaded_ == nullptr) loaded_ = std::make_shared<LoadedKernels>(list_);
    const Dims& table = in[kBlockTable].dims;
    const StepDims dims{in[kQ].dims.d[0], table.d[0], table.d[1], in[kKPool].dims.d[0]};
    if (dims.tokens == 0) return 0;
    std::map<std::string, const void*> pointers;
    const bool is_scaled = IsScaled(in[kKPool].type);
    for (int32_t n = 0; n < (is_scaled ? kScaledInputs : kPlainInputs); ++n)
      pointers[kInputNames[n]] = inputs[n];
    pointers["k_pool"] = outputs[kKPoolOut];
    pointers["v_pool"] = outputs[kVPoolOut];
    pointers["out"] = outputs[kOut];
    char* piece_at = static_cast<char*>(workspace);
    for (const KernelList::Piece& piece : list_.workspace) {
      pointers[piece.name] = piece_at;
      piece_at += PieceBytes(piece, dims);
    }
    for (size_t n = 0; n < list_.kernels.size(); ++n) {
      const KernelImage& kernel = list_.kernels[n];
      std::vector<const void*> held_pointers(kernel.arguments.size());
      std::vector<int32_t> held_numbers(kernel.arguments.size());
      std::vector<void*> arguments;
      for (size_t a = 0; a < kernel.arguments.size(); ++a) {
        const Argument& argument = kernel.arguments[a];
        if (argument.number.empty()) {
          const auto found = pointers.find(argument.pointer);
          if (found == pointers.end())
            throw PluginError("kernel " + kernel.name + " needs " + argument.pointer);
          held_pointers[a] = found->second;
          arguments.push_back(&held_pointers[a]);
        } else {
          held_numbers[a] = static_cast<int32_t>(argument.number[0].At(dims));
          arguments.push_back(&held_numbers[a]);
        }
      }
      // Two pointers more than described, for memory that our kernels do not use: the Triton
      // compiler adds them.
      const void* null = nullptr;
      arguments.push_back(&null);
      arguments.push_back(&null);
      const uint32_t x = GridSize(kernel.grid[0], dims), y = GridSize(kernel.grid[1], dims),
                     z = GridSize(kernel.grid[2], dims);
      if (x == 0 || y == 0 || z == 0) continue;
      Check(Driver::Get().launch_kernel(
                reinterpret_cast<CUfunction>((*loaded_)[n]), x, y, z, kernel.threads, 1, 1,
                kernel.shared_bytes, reinterpret_cast<CUstream>(stream), arguments.data(), nullptr),
            ("cuLaunchKernel of " + kernel.name).c_str());
    }
    return 0;
  });
}

nvinfer1::IPluginV3* PagedAttentionPlugin::attachToContext(
    nvinfer1::IPluginResourceContext*) noexcept {
  return Guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
    // Here, where all contexts get the same and no run is being captured into a graph.
    if (loaded_ == nullptr) loaded_ = std::make_shared<LoadedKernels>(list_);
    return clone();
  });
}

const nvinfer1::PluginFieldCollection* PagedAttentionPlugin::getFieldsToSerialize() noexcept {
  return Guarded<const nvinfer1::PluginFieldCollection*>(nullptr, [&] {
    const auto whole = [](const char* name, const int32_t& value) {
      return PluginField(name, &value, PluginFieldType::kINT32, 1);
    };
    serialized_ = {whole("num_heads", fields_.num_heads),
                   whole("kv_num_heads", fields_.kv_num_heads),
                   whole("head_dim", fields_.head_dim),
                   PluginField("scale", &fields_.scale, PluginFieldType::kFLOAT32, 1),
                   PluginField("softcap", &fields_.softcap, PluginFieldType::kFLOAT32, 1),
                   whole("window", fields_.window),
                   whole("query_rows", fields_.query_rows),
                   whole("split_len", fields_.split_len),
                   PluginField("kernels", fields_.kernels.data(), PluginFieldType::kCHAR,
                               static_cast<int32_t>(fields_.kernels.size()))};
    collection_ = {static_cast<int32_t>(serialized_.size()), serialized_.data()};
    return &collection_;
  });
}

PagedAttentionCreator::PagedAttentionCreator() {
  for (const char* name : {"num_heads", "kv_num_heads", "head_dim"}) {
    names_.emplace_back(name, nullptr, PluginFieldType::kINT32, 1);
  }
  names_.emplace_back("scale", nullptr, PluginFieldType::kFLOAT32, 1);
  names_.emplace_back("softcap", nullptr, PluginFieldType::kFLOAT32, 1);
  for (const char* name : {"window", "query_rows", "split_len"}) {
    names_.emplace_back(name, nullptr, PluginFieldType::kINT32, 1);
  }
  names_.emplace_back("kernels", nullptr, PluginFieldType::kCHAR, 1);
  collection_ = {static_cast<int32_t>(names_.size()), names_.data()};
}

nvinfer1::IPluginV3* PagedAttentionCreator::createPlugin(
    const char* name, const nvinfer1::PluginFieldCollection* fields,
    nvinfer1::TensorRTPhase) noexcept {
  return Guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
    if (fields == nullptr)
      throw PluginError(std::string(name == nullptr ? "" : name) + " was given no fields");
    return new PagedAttentionPlugin(Fields::Parse(*fields));
  });
}

const std::string& PagedAttentionCreator::LastError() { return t_last_error; }

}  // namespace plansmith

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(
    nvinfer1::ILoggerFinder* finder) {
  plansmith::g_logger = finder == nullptr ? nullptr : finder->findLogger();
}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const*
getCreators(int32_t& num_creators) {
  static plansmith::PagedAttentionCreator creator;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
  num_creators = 1;
  return creators;
}
