// Words that cross from Python as they are written there, in the order of the numbers that stand for them here.
#pragma once

namespace quire {

inline constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh", "relu", "tanh", "ClampedSwiGLU"};
inline constexpr const char* kGroupScores[] = {"max", "top2"};
inline constexpr const char* kNormKinds[] = {"rms", "layer"};
inline constexpr const char* kPoolKinds[] = {"mean", "first"};
inline constexpr const char* kRouterScores[] = {"softmax", "sigmoid"};

}  // namespace quire
