// The plugin library without TensorRT and without a GPU: fields, types, shapes, workspace, and what
// is launched.
//
// usage: plugin_test KERNELS_FILE    (plugin_library.py's field for H 8, KVH 2, D 64, BS 32,
// query_rows 4, split_len 512)

#include "../../plugins/paged_attention/plugin.h"

#include <cassert>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#undef NDEBUG
#include <cassert>

namespace {

using namespace plansmith;
using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

struct FieldSet {
  int32_t num_heads = 8, kv_num_heads = 2, head_dim = 64, window = 0, query_rows = 4,
          split_len = 512;
  float scale = 0.125f, softcap = 0;
  std::string kernels;

  std::vector<PluginField> List() const {
    return {
        {"num_heads", &num_heads, PluginFieldType::kINT32, 1},
        {"kv_num_heads", &kv_num_heads, PluginFieldType::kINT32, 1},
        {"head_dim", &head_dim, PluginFieldType::kINT32, 1},
        {"scale", &scale, PluginFieldType::kFLOAT32, 1},
        {"softcap", &softcap, PluginFieldType::kFLOAT32, 1},
        {"window", &window, PluginFieldType::kINT32, 1},
        {"query_rows", &query_rows, PluginFieldType::kINT32, 1},
        {"split_len", &split_len, PluginFieldType::kINT32, 1},
        {"kernels", kernels.data(), PluginFieldType::kCHAR, static_cast<int32_t>(kernels.size())}};
  }
};

nvinfer1::IPluginV3* Create(const std::vector<PluginField>& fields) {
  static PagedAttentionCreator creator;
  const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(fields.size()),
                                                   fields.data()};
  return creator.createPlugin("layer", &collection, nvinfer1::TensorRTPhase::kBUILD);
}

void ExpectError(const std::vector<PluginField>& fields, const char* words) {
  assert(Create(fields) == nullptr);
  if (PagedAttentionCreator::LastError().find(words) == std::string::npos) {
    std::fprintf(stderr, "wanted '%s', got '%s'\n", words,
                 PagedAttentionCreator::LastError().c_str());
    assert(false);
  }
}

void TestFields(const FieldSet& set) {
  auto fields = set.List();
  fields.pop_back();
  ExpectError(fields, "the field kernels is missing");
  fields = set.List();
  fields[0].name = "heads";
  ExpectError(fields, "the field 'heads' is not known");
  fields = set.List();
  fields[2].type = PluginFieldType::kFLOAT32;
  ExpectError(fields, "the field head_dim has type 1 and length 1, it must be one int");
  const int64_t three = 3;
  fields = set.List();
  fields[1] = {"kv_num_heads", &three, PluginFieldType::kINT64, 1};
  ExpectError(fields, "the field num_heads is 8, no multiple of kv_num_heads 3");
  FieldSet odd = set;
  odd.head_dim = 8;
  ExpectError(odd.List(), "the field head_dim is 8, it must be within 16..256");
  odd = set;
  odd.kernels = "plansmith-kernels 9\n";
  ExpectError(odd.List(), "it begins with 'plansmith-kernels 9'");
  for (size_t cut = 0; cut < set.kernels.size(); cut += 1 + set.kernels.size() / 97) {
    odd.kernels = set.kernels.substr(0, cut);
    assert(Create(odd.List()) == nullptr);  // cut anywhere: an error, no crash
  }
  odd.kernels = set.kernels;
  const size_t at = odd.kernels.find("pointer q\n");
  assert(at != std::string::npos);
  odd.kernels[at + 8] = 'x';
  ExpectError(odd.List(), "takes 'x', which is neither a tensor of the op nor workspace");
}

void TestFormulas() {
  assert(Formula("T 16 / B +").At({37, 5, 40, 100}) == 7);
  assert(Formula("MB 32 * 511 + 512 /").At({1, 1, 40, 1}) == 3);
  assert(Formula("NB").At({1, 1, 40, 100}) == 100);
  for (const char* bad : {"", "T B", "+", "T +", "T X +", "1e3"}) {
    bool is_refused = false;
    try {
      Formula{bad};
    } catch (const PluginError&) {
      is_refused = true;
    }
    assert(is_refused);
  }
}

Dims D(std::initializer_list<int64_t> sizes) {
  Dims dims{};
  dims.nbDims = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), dims.d);
  return dims;
}

std::vector<DynamicPluginTensorDesc> Step(DataType type, DataType pool, bool is_scaled) {
  std::vector<DynamicPluginTensorDesc> in;
  const auto add = [&](DataType kind, Dims dims, Dims most) {
    in.push_back({{dims, kind, nvinfer1::TensorFormat::kLINEAR, 1.0f}, dims, most, dims});
  };
  add(type, D({37, 512}), D({256, 512}));
  add(type, D({37, 128}), D({256, 128}));
  add(type, D({37, 128}), D({256, 128}));
  add(pool, D({100, 2, 32, 64}), D({1000, 2, 32, 64}));
  add(pool, D({100, 2, 32, 64}), D({1000, 2, 32, 64}));
  add(DataType::kINT32, D({6}), D({17}));
  add(DataType::kINT32, D({5}), D({16}));
  add(DataType::kINT32, D({5, 40}), D({16, 64}));
  if (is_scaled) {
    add(DataType::kFLOAT, D({}), D({}));
    add(DataType::kFLOAT, D({}), D({}));
  }
  return in;
}

bool Supports(PagedAttentionPlugin& plugin, std::vector<DynamicPluginTensorDesc> all) {
  const auto q = all[0], k_pool = all[3];
  const auto num_inputs = static_cast<int32_t>(all.size());
  all.insert(all.end(), {q, k_pool, k_pool});
  for (int32_t pos = 0; pos < static_cast<int32_t>(all.size()); ++pos) {
    if (!plugin.supportsFormatCombination(pos, all.data(), num_inputs, 3)) return false;
  }
  return true;
}

void TestTypesAndShapes(PagedAttentionPlugin& plugin) {
  const DataType half = DataType::kHALF, bf16 = DataType::kBF16, fp8 = DataType::kFP8,
                 int8 = DataType::kINT8;
  assert(Supports(plugin, Step(half, half, false)) && Supports(plugin, Step(bf16, bf16, false)));
  assert(Supports(plugin, Step(half, fp8, true)) && Supports(plugin, Step(bf16, int8, true)));
  assert(!Supports(plugin, Step(half, bf16, false)) && !Supports(plugin, Step(half, fp8, false)));
  assert(!Supports(plugin, Step(half, half, true)) &&
         !Supports(plugin, Step(DataType::kFLOAT, half, false)));
  auto other = Step(half, half, false);
  other[5].desc.type = DataType::kINT64;
  assert(!Supports(plugin, other));
  other = Step(half, half, false);
  other[0].desc.format = nvinfer1::TensorFormat::kCHW32;
  assert(!Supports(plugin, other));

  DataType out[3];
  const DataType in[] = {half,
                         half,
                         half,
                         fp8,
                         fp8,
                         DataType::kINT32,
                         DataType::kINT32,
                         DataType::kINT32,
                         DataType::kFLOAT,
                         DataType::kFLOAT};
  assert(plugin.getOutputDataTypes(out, 3, in, 10) == 0 && out[0] == half && out[1] == fp8 &&
         out[2] == fp8);
  assert(plugin.getOutputDataTypes(out, 3, in, 9) != 0);
  assert(plugin.getAliasedInput(0) == -1 && plugin.getAliasedInput(1) == 3 &&
         plugin.getAliasedInput(2) == 4);

  auto step = Step(half, half, false);
  assert(plugin.configurePlugin(step.data(), 8, nullptr, 3) == 0);
  step[5].desc.dims = D({5});
  assert(plugin.configurePlugin(step.data(), 8, nullptr, 3) != 0);
  assert(PagedAttentionCreator::LastError() == "cu_query_lens is [5], it must be [6] (-1 = any)");
  step = Step(half, half, false);
  step[3].desc.dims = D({-1, 3, 32, 64});
  assert(plugin.configurePlugin(step.data(), 8, nullptr, 3) != 0);
  assert(PagedAttentionCreator::LastError() ==
         "k_pool is [-1, 3, 32, 64], it must be [-1, 2, -1, 64] (-1 = any)");

  // B 16, query_rows 4, H 8, S = 64 * 32 / 512 = 4: partials of 64 and stats of 2 float32.
  step = Step(half, half, false);
  assert(plugin.getWorkspaceSize(step.data(), 8, nullptr, 3) == 16u * 4 * 8 * 4 * (64 + 2) * 4);
}

// A driver that records.
struct Launched {
  std::string symbol;
  std::vector<unsigned> sizes;  // grid, block, shared
  void** arguments;
  std::vector<uint64_t> values;
};
std::vector<Launched> g_launches;
std::map<CUkernel, std::string> g_symbols;
std::map<std::string, size_t> g_num_arguments;
int g_loaded = 0;

CUresult Load(CUlibrary* out, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*,
              void**, unsigned) {
  assert(std::memcmp(image,
                     "\x7f"
                     "ELF",
                     4) == 0);
  *out = reinterpret_cast<CUlibrary>(static_cast<intptr_t>(++g_loaded));
  return CUDA_SUCCESS;
}
CUresult Unload(CUlibrary) {
  --g_loaded;
  return CUDA_SUCCESS;
}
CUresult GetKernel(CUkernel* out, CUlibrary library, const char* symbol) {
  *out = reinterpret_cast<CUkernel>(library);
  g_symbols[*out] = symbol;
  return CUDA_SUCCESS;
}
CUresult SetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) { return CUDA_SUCCESS; }
CUresult GetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
CUresult Launch(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                unsigned bz, unsigned shared, CUstream, void** arguments, void**) {
  Launched one{g_symbols[reinterpret_cast<CUkernel>(function)],
               {x, y, z, bx, by, bz, shared},
               arguments,
               {}};
  for (size_t n = 0; n < g_num_arguments[one.symbol] + 2; ++n) {
    uint64_t value = 0;
    std::memcpy(&value, arguments[n],
                4);  // low half: numbers, and pointers below 2^32 in this test
    one.values.push_back(value);
  }
  g_launches.push_back(one);
  return CUDA_SUCCESS;
}

void TestLaunches(PagedAttentionPlugin& plugin, const FieldSet& set) {
  Driver::Set({Load, Unload, GetKernel, SetAttribute, GetDevice, Launch});
  const KernelList list = KernelList::Parse(set.kernels);
  for (const KernelImage& kernel : list.kernels)
    g_num_arguments[kernel.symbol] = kernel.arguments.size();
  std::vector<PluginTensorDesc> in;
  for (const auto& one : Step(DataType::kHALF, DataType::kHALF, false)) in.push_back(one.desc);
  const void* inputs[8];
  void* outputs[3];
  for (uintptr_t n = 0; n < 8; ++n) inputs[n] = reinterpret_cast<void*>(0x1000 * (n + 1));
  for (uintptr_t n = 0; n < 3; ++n) outputs[n] = reinterpret_cast<void*>(0x10000 * (n + 1));
  void* workspace = reinterpret_cast<void*>(0x100000);
  const int32_t code = plugin.enqueue(in.data(), nullptr, inputs, outputs, workspace, nullptr);
  if (code != 0) std::fprintf(stderr, "%s\n", PagedAttentionCreator::LastError().c_str());
  assert(code == 0);
  assert(g_launches.size() == list.kernels.size());
  const std::map<std::string, uint64_t> pointers = {
      {"q", 0x1000},
      {"k", 0x2000},
      {"v", 0x3000},
      {"k_pool", 0x20000},
      {"v_pool", 0x30000},
      {"cu_query_lens", 0x6000},
      {"kv_lens", 0x7000},
      {"block_table", 0x8000},
      {"out", 0x10000},
      {"partials", 0x100000},
      {"stats", 0x100000 + 5u * 4 * 8 * 3 * 64 * 4}};  // S = 40 * 32 / 512 rounded up = 3
  const std::map<std::string, std::vector<unsigned>> grids = {
      {"decode", {2, 5, 3}}, {"combine", {8, 4, 5}}, {"prefill", {2, 37 / 32 + 5, 1}}};
  for (size_t n = 0; n < g_launches.size(); ++n) {
    const KernelImage& kernel = list.kernels[n];
    const Launched& one = g_launches[n];
    assert(one.symbol == kernel.symbol && one.sizes[3] == kernel.threads &&
           one.sizes[6] == kernel.shared_bytes);
    if (const auto grid = grids.find(one.symbol); grid != grids.end()) {
      assert(std::equal(grid->second.begin(), grid->second.end(), one.sizes.begin()));
    }
    for (size_t a = 0; a < kernel.arguments.size(); ++a) {
      const Argument& argument = kernel.arguments[a];
      const uint64_t wanted = argument.number.empty()
                                  ? (argument.pointer == "k_scale" || argument.pointer == "v_scale"
                                         ? 0
                                         : pointers.at(argument.pointer))
                                  : static_cast<uint64_t>(argument.number[0].At({37, 5, 40, 100}));
      assert(one.values[a] == wanted);
    }
    assert(one.values[kernel.arguments.size()] == 0 &&
           one.values[kernel.arguments.size() + 1] == 0);
  }
}

void TestSerialized(PagedAttentionPlugin& plugin, const FieldSet& set) {
  const nvinfer1::PluginFieldCollection* fields = plugin.getFieldsToSerialize();
  assert(fields != nullptr && fields->nbFields == 9);
  const Fields again = Fields::Parse(*fields);
  assert(again.num_heads == 8 && again.split_len == 512 && again.scale == 0.125f &&
         again.kernels == set.kernels);
  static PagedAttentionCreator creator;
  std::unique_ptr<nvinfer1::IPluginV3> copy(
      creator.createPlugin("again", fields, nvinfer1::TensorRTPhase::kRUNTIME));
  assert(copy != nullptr);
  for (int32_t n = 0; n < fields->nbFields; ++n) {
    assert(std::strcmp(fields->fields[n].name, creator.getFieldNames()->fields[n].name) == 0);
    assert(fields->fields[n].type == creator.getFieldNames()->fields[n].type);
  }
  int32_t count = 0;
  const auto* creators = getCreators(count);
  assert(count == 1 &&
         std::strcmp(creators[0]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0);
}

}  // namespace

int main(int argc, char** argv) {
  assert(argc == 2);
  std::ifstream file(argv[1], std::ios::binary);
  FieldSet set;
  set.kernels.assign(std::istreambuf_iterator<char>(file), {});
  TestFormulas();
  TestFields(set);
  {
    std::unique_ptr<nvinfer1::IPluginV3> made(Create(set.List()));
    if (made == nullptr) std::fprintf(stderr, "%s\n", PagedAttentionCreator::LastError().c_str());
    auto* plugin = dynamic_cast<PagedAttentionPlugin*>(made.get());
    assert(plugin != nullptr);
    for (auto type : {nvinfer1::PluginCapabilityType::kCORE, nvinfer1::PluginCapabilityType::kBUILD,
                      nvinfer1::PluginCapabilityType::kRUNTIME}) {
      assert(plugin->getCapabilityInterface(type) != nullptr);
    }
    TestTypesAndShapes(*plugin);
    TestLaunches(*plugin, set);
    TestSerialized(*plugin, set);
    std::unique_ptr<nvinfer1::IPluginV3> copy(plugin->clone());
    assert(copy != nullptr && g_loaded > 0);
    // Contexts share what is loaded, and have it before their first run.
    const int loaded = g_loaded;
    std::unique_ptr<nvinfer1::IPluginV3> attached(plugin->attachToContext(nullptr));
    assert(attached != nullptr && g_loaded == loaded);
    std::unique_ptr<nvinfer1::IPluginV3> other(Create(set.List()));
    std::unique_ptr<nvinfer1::IPluginV3> first(
        dynamic_cast<PagedAttentionPlugin*>(other.get())->attachToContext(nullptr));
    assert(first != nullptr && g_loaded == 2 * loaded);
  }
  assert(g_loaded == 0);  // unloaded with the last plugin
  std::puts("ok");
}
