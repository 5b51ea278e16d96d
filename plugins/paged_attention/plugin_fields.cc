// The plugin's fields and the kernels in them: read, checked, and how they are written is in
// plugin_library.py.

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "plugin.h"

namespace plansmith {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

constexpr char kMagic[] = "plansmith-kernels 1";

// Takes lines off a field's bytes.
class Lines {
 public:
  explicit Lines(const std::string& bytes) : bytes_(bytes) {}

  bool AtEnd() const { return at_ == bytes_.size(); }

  std::string Next() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string::npos) Fail("it ends within a line");
    std::string line = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    ++number_;
    return line;
  }

  std::string Bytes(uint64_t count) {
    if (count > bytes_.size() - at_) Fail("it ends within an image");
    std::string taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }

  [[noreturn]] void Fail(const std::string& what) const {
    throw PluginError("the field kernels is damaged (line " + std::to_string(number_) +
                      "): " + what +
                      "; make it with plugins/paged_attention/plugin_library.py of this version");
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
  int number_ = 0;
};

// The dimension that a formula's word stands for; null where it is none.
int64_t StepDims::* Dimension(const std::string& word) {
  if (word == "T") return &StepDims::tokens;
  if (word == "B") return &StepDims::batch;
  if (word == "MB") return &StepDims::table;
  return word == "NB" ? &StepDims::blocks : nullptr;
}

std::pair<std::string, std::string> FirstWord(const std::string& line) {
  const size_t space = line.find(' ');
  if (space == std::string::npos) return {line, ""};
  return {line.substr(0, space), line.substr(space + 1)};
}

KernelImage ParseKernel(Lines& lines, const std::string& head) {
  KernelImage kernel{};
  std::istringstream words(head);
  uint64_t num_arguments = 0, image_bytes = 0;
  if (!(words >> kernel.name >> kernel.symbol >> kernel.threads >> kernel.shared_bytes >>
        num_arguments >> image_bytes)) {
    lines.Fail("a kernel is NAME SYMBOL THREADS SHARED ARGUMENTS BYTES, got '" + head + "'");
  }
  if (kernel.threads == 0 || kernel.threads > 1024 || num_arguments > 64) {
    lines.Fail("kernel " + kernel.name + " has impossible numbers: '" + head + "'");
  }
  for (int axis = 0; axis < 3; ++axis) kernel.grid.emplace_back(lines.Next());
  for (uint64_t n = 0; n < num_arguments; ++n) {
    const auto [kind, text] = FirstWord(lines.Next());
    Argument argument;
    if (kind == "pointer") {
      argument.pointer = text;
    } else if (kind == "number") {
      argument.number.emplace_back(text);
    } else {
      lines.Fail("an argument is a pointer or a number, got '" + kind + "'");
    }
    kernel.arguments.push_back(std::move(argument));
  }
  kernel.image = lines.Bytes(image_bytes);
  if (kernel.image.empty()) lines.Fail("kernel " + kernel.name + " has no image");
  return kernel;
}

template <typename T>
T Number(const PluginField& field, const char* wanted) {
  if (field.data != nullptr && field.length == 1) {
    switch (field.type) {
      case PluginFieldType::kINT32:
        return static_cast<T>(*static_cast<const int32_t*>(field.data));
      case PluginFieldType::kINT64:
        return static_cast<T>(*static_cast<const int64_t*>(field.data));
      case PluginFieldType::kFLOAT32:
        if (std::is_floating_point_v<T>)
          return static_cast<T>(*static_cast<const float*>(field.data));
        break;
      case PluginFieldType::kFLOAT64:
        if (std::is_floating_point_v<T>)
          return static_cast<T>(*static_cast<const double*>(field.data));
        break;
      default:
        break;
    }
  }
  throw PluginError(std::string("the field ") + field.name + " has type " +
                    std::to_string(static_cast<int>(field.type)) + " and length " +
                    std::to_string(field.length) + ", it must be one " + wanted);
}

void CheckRange(const char* name, double value, double low, double high) {
  if (value >= low && value <= high) return;  // NaN is neither
  std::ostringstream text;
  text << "the field " << name << " is " << value << ", it must be within " << low << ".." << high;
  throw PluginError(text.str());
}

}  // namespace

Formula::Formula(const std::string& text) {
  std::istringstream words(text);
  int depth = 0;
  for (std::string word; words >> word;) {
    const bool is_operator = word == "+" || word == "*" || word == "/" || word == "-";
    const bool is_number =
        !word.empty() && word.size() <= 18 &&
        std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
    depth += is_operator ? -1 : 1;
    if (depth < 1 || !(is_operator || is_number || Dimension(word) != nullptr)) {
      depth = 0;
      break;
    }
    words_.push_back(word);
  }
  if (depth != 1)
    throw PluginError("the field kernels is damaged: '" + text +
                      "' is no formula of T, B, MB and NB");
}

int64_t Formula::At(const StepDims& dims) const {
  std::vector<int64_t> stack;
  for (const std::string& word : words_) {
    if (const auto dimension = Dimension(word); dimension != nullptr) {
      stack.push_back(dims.*dimension);
    } else if (word[0] >= '0' && word[0] <= '9') {
      stack.push_back(std::stoll(word));
    } else {
      const int64_t b = stack.back();
      stack.pop_back();
      int64_t& a = stack.back();
      if (word == "/" && b == 0) throw PluginError("a formula of the field kernels divides by 0");
      a = word == "+" ? a + b : word == "*" ? a * b : word == "-" ? a - b : a / b;
    }
  }
  return stack.back();
}

KernelList KernelList::Parse(const std::string& bytes) {
  Lines lines(bytes);
  KernelList list;
  const std::string magic = lines.Next();
  if (magic != kMagic)
    lines.Fail("it begins with '" + magic.substr(0, 40) + "', not '" + kMagic + "'");
  while (!lines.AtEnd()) {
    const auto [kind, text] = FirstWord(lines.Next());
    if (kind == "workspace") {
      const auto [name, formula] = FirstWord(text);
      list.workspace.push_back({name, Formula(formula)});
    } else if (kind == "kernel") {
      list.kernels.push_back(ParseKernel(lines, text));
    } else {
      lines.Fail("a line begins with workspace or kernel, got '" + kind.substr(0, 40) + "'");
    }
  }
  if (list.kernels.empty()) lines.Fail("it has no kernel");
  return list;
}

Fields Fields::Parse(const nvinfer1::PluginFieldCollection& collection) {
  Fields fields;
  const std::map<std::string, int32_t*> ints = {
      {"num_heads", &fields.num_heads},   {"kv_num_heads", &fields.kv_num_heads},
      {"head_dim", &fields.head_dim},     {"window", &fields.window},
      {"query_rows", &fields.query_rows}, {"split_len", &fields.split_len},
  };
  const std::map<std::string, float*> floats = {{"scale", &fields.scale},
                                                {"softcap", &fields.softcap}};
  std::map<std::string, bool> seen;
  for (int32_t n = 0; n < collection.nbFields; ++n) {
    const PluginField& field = collection.fields[n];
    const std::string name = field.name == nullptr ? "" : field.name;
    if (const auto found = ints.find(name); found != ints.end()) {
      *found->second = Number<int32_t>(field, "int");
    } else if (const auto real = floats.find(name); real != floats.end()) {
      *real->second = Number<float>(field, "float");
    } else if (name == "kernels") {
      if (field.data == nullptr || field.length <= 0)
        throw PluginError("the field kernels is empty");
      fields.kernels.assign(static_cast<const char*>(field.data),
                            static_cast<size_t>(field.length));
    } else {
      throw PluginError("the field '" + name + "' is not known to plansmith::PagedAttention");
    }
    seen[name] = true;
  }
  for (const char* name : {"num_heads", "kv_num_heads", "head_dim", "scale", "softcap", "window",
                           "query_rows", "split_len", "kernels"}) {
    if (!seen[name]) throw PluginError(std::string("the field ") + name + " is missing");
  }
  CheckRange("num_heads", fields.num_heads, 1, 4096);
  CheckRange("kv_num_heads", fields.kv_num_heads, 1, fields.num_heads);
  CheckRange("head_dim", fields.head_dim, 16, 256);
  CheckRange("window", fields.window, 0, 1 << 30);
  CheckRange("query_rows", fields.query_rows, 1, 64);
  CheckRange("split_len", fields.split_len, 128, 1 << 30);
  CheckRange("scale", fields.scale, 1e-30, 1e30);
  CheckRange("softcap", fields.softcap, 0, 1e30);
  if (fields.num_heads % fields.kv_num_heads != 0) {
    throw PluginError("the field num_heads is " + std::to_string(fields.num_heads) +
                      ", no multiple of kv_num_heads " + std::to_string(fields.kv_num_heads));
  }
  return fields;
}

}  // namespace plansmith
