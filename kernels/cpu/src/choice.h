// The choice among the kernels of several instruction sets: the best of this machine, or the one that a test names.
#pragma once

#include <atomic>

namespace {

// `Kernels` has a name and usable(); `list` ends with null.
template <class Kernels> class Choice {
 public:
  explicit constexpr Choice(const Kernels* const* list) : list_(list) {}

  // Those that serve; null where none is usable.
  const Kernels* best() {
    if (!used_)
      for (const Kernels* const* kernels = list_; *kernels && !used_; kernels++)
        if ((*kernels)->usable()) used_ = *kernels;
    return used_;
  }
  void use(int index) { used_ = list_[index]; }
  // The name of entry `index`, or null one past the last.
  const char* name(int index, int* usable) const {
    if (!list_[index]) return nullptr;
    *usable = list_[index]->usable();
    return list_[index]->name;
  }

 private:
  const Kernels* const* list_;
  std::atomic<const Kernels*> used_{nullptr};
};

}  // namespace
