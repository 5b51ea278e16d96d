// plansmith::PagedAttention as a TensorRT plugin (IPluginV3): the op of builder/graph/contract.py
// in one node.
//
// The Python plugins (plugin.py) put their kernels into the plan and need no library; this one is
// for programs that build networks in C++, and launches all kernels of the op itself: KV write,
// decode, combine, prefill. Its kernels come as the field "kernels" (plugin_library.py makes it),
// which a plan holds like the other fields.
//
//   inputs   q [T, H*D], k, v [T, KVH*D], k_pool, v_pool [NB, KVH, BS, D], and int32
//            cu_query_lens [B+1], kv_lens [B], block_table [B, MB]; with FP8 or INT8 pools also
//            k_scale, v_scale [] float32
//   outputs  out [T, H*D] like q; k_pool_out, v_pool_out: their inputs, in place (preview feature
//            ALIASED_PLUGIN_IO_10_03)
//   fields   num_heads, kv_num_heads, head_dim, window, query_rows, split_len (int); scale,
//            softcap (float); kernels

#ifndef PLANSMITH_PLUGINS_PAGED_ATTENTION_PLUGIN_H_
#define PLANSMITH_PLUGINS_PAGED_ATTENTION_PLUGIN_H_

#include <cuda.h>

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "NvInfer.h"

namespace plansmith {

constexpr char kPluginName[] = "PagedAttention";
constexpr char kPluginVersion[] = "1";
constexpr char kPluginNamespace[] = "plansmith";

// What is wrong with fields or kernels, in words.
class PluginError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The free dimensions of a step: T, B, MB, NB.
struct StepDims {
  int64_t tokens;
  int64_t batch;
  int64_t table;
  int64_t blocks;
};

// A number in terms of T, B, MB and NB, in reverse Polish notation: "T 16 / B +". Division rounds
// down.
class Formula {
 public:
  // Throws PluginError unless the text leaves one number.
  explicit Formula(const std::string& text);
  int64_t At(const StepDims& dims) const;

 private:
  std::vector<std::string> words_;
};

// One argument of a kernel: a tensor or piece of workspace by its name, or a number.
struct Argument {
  std::string pointer;          // "" = a number
  std::vector<Formula> number;  // one, or none
};

// One kernel of the op and how it is launched.
struct KernelImage {
  std::string name;    // for messages
  std::string symbol;  // its function in the image
  uint32_t threads;
  uint32_t shared_bytes;
  std::vector<Formula> grid;  // 3
  std::vector<Argument> arguments;
  std::string image;  // cubin or PTX
};

// The field "kernels": pieces of workspace by name with their sizes in bytes, and kernels in the
// order of their launches.
struct KernelList {
  struct Piece {
    std::string name;
    Formula bytes;
  };
  std::vector<Piece> workspace;
  std::vector<KernelImage> kernels;

  // Throws PluginError that names the line.
  static KernelList Parse(const std::string& bytes);
};

// The plugin's fields.
struct Fields {
  int32_t num_heads = 0;
  int32_t kv_num_heads = 0;
  int32_t head_dim = 0;
  int32_t window = 0;
  int32_t query_rows = 0;
  int32_t split_len = 0;
  float scale = 0;
  float softcap = 0;
  std::string kernels;

  // Throws PluginError for a field that is unknown, missing, of another type or out of range.
  static Fields Parse(const nvinfer1::PluginFieldCollection& collection);
};

// The CUDA driver's functions that a launch takes; loaded from libcuda.so.1 when first needed.
struct Driver {
  CUresult (*library_load)(CUlibrary*, const void*, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned);
  CUresult (*library_unload)(CUlibrary);
  CUresult (*library_get_kernel)(CUkernel*, CUlibrary, const char*);
  CUresult (*kernel_set_attribute)(CUfunction_attribute, int, CUkernel, CUdevice);
  CUresult (*ctx_get_device)(CUdevice*);
  CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, CUstream, void**, void**);

  // Throws PluginError where there is no driver.
  static const Driver& Get();
  // What Get returns from now on; for tests.
  static void Set(const Driver& driver);
};

// Kernels loaded on a device, unloaded with the last plugin that holds them. Launches from any
// thread.
class LoadedKernels {
 public:
  explicit LoadedKernels(const KernelList& list);
  ~LoadedKernels();
  LoadedKernels(const LoadedKernels&) = delete;
  LoadedKernels& operator=(const LoadedKernels&) = delete;
  CUkernel operator[](size_t n) const { return kernels_[n]; }

 private:
  std::vector<CUlibrary> libraries_;
  std::vector<CUkernel> kernels_;
};

// Exceptions end inside: TensorRT gets -1, false or null, and the message goes to its log.
class PagedAttentionPlugin final : public nvinfer1::IPluginV3,
                                   public nvinfer1::IPluginV3OneCore,
                                   public nvinfer1::v_2_0::IPluginV3OneBuild,
                                   public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit PagedAttentionPlugin(Fields fields);

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return 3; }
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out,
                          int32_t num_outputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* out, int32_t num_outputs,
                             const nvinfer1::DataType* in,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* in, int32_t num_inputs,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* out, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t pos, const nvinfer1::DynamicPluginTensorDesc* in_out,
                                 int32_t num_inputs, int32_t num_outputs) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out,
                          int32_t num_outputs) const noexcept override;
  int32_t getAliasedInput(int32_t output_idx) noexcept override;

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t num_inputs,
                        const nvinfer1::PluginTensorDesc* out,
                        int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  void CheckShapes(const nvinfer1::Dims* dims, int32_t num_inputs) const;

  Fields fields_;
  KernelList list_;
  std::shared_ptr<LoadedKernels> loaded_;
  std::vector<nvinfer1::PluginField> serialized_;
  nvinfer1::PluginFieldCollection collection_{};
};

class PagedAttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  PagedAttentionCreator();

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  // Why the last createPlugin of this thread gave null.
  static const std::string& LastError();

 private:
  std::vector<nvinfer1::PluginField> names_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace plansmith

// What TensorRT looks for in a plugin library.
extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& num_creators);

#endif  // PLANSMITH_PLUGINS_PAGED_ATTENTION_PLUGIN_H_
