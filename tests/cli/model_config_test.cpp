/// config.json as the families of models write it: the same facts under their names.
#include "model_config.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "errors.hpp"
#include "run_tool.hpp"

namespace moestro::test {
namespace {

struct Group {
  std::int64_t d_model, d_ff, num_experts, top_k, num_layers;
};

struct Family {
  const char* name;
  const char* json;
  std::vector<Group> groups;
  std::int64_t num_layers;
  ActivationKind activation = ActivationKind::kSwiGLU;
};
void PrintTo(const Family& family, std::ostream* out) {
  *out << family.name;
}

class FamilyTest : public testing::TestWithParam<Family> {};

TEST_P(FamilyTest, IsRead) {
  const Family& family = GetParam();
  const cli::ModelConfig model = cli::read_model_config(temporary_file("family.json", family.json));
  EXPECT_EQ(model.num_layers, family.num_layers);
  ASSERT_EQ(model.groups.size(), family.groups.size());
  for (std::size_t i = 0; i < model.groups.size(); ++i) {
    EXPECT_EQ(model.groups[i].d_model, family.groups[i].d_model);
    EXPECT_EQ(model.groups[i].d_ff, family.groups[i].d_ff);
    EXPECT_EQ(model.groups[i].num_experts, family.groups[i].num_experts);
    EXPECT_EQ(model.groups[i].top_k, family.groups[i].top_k);
    EXPECT_EQ(model.groups[i].num_layers, family.groups[i].num_layers);
  }
  ASSERT_TRUE(model.activation.has_value());
  EXPECT_EQ(model.activation->kind, family.activation);
}

INSTANTIATE_TEST_SUITE_P(
    Families, FamilyTest,
    testing::Values(
        Family{"mixtral",
               R"({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
          "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32, "hidden_act": "silu"})",
               {{4096, 14336, 8, 2, 32}},
               32},
        Family{"qwen2_moe",
               R"({"hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
          "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "decoder_sparse_step": 2,
          "mlp_only_layers": [1, 3], "hidden_act": "silu"})",
               {{2048, 1408, 60, 4, 10}},
               24},
        Family{"deepseek_v3",
               R"({"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
          "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
          "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_hidden_layers": 61, "hidden_act": "silu"})",
               {{7168, 2048, 256, 8, 58}},
               61},
        Family{"kimi_linear",
               R"({"hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
          "num_experts": 256, "num_experts_per_token": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1,
          "num_hidden_layers": 27, "hidden_act": "silu"})",
               {{2304, 1024, 256, 8, 26}},
               27},
        Family{"gpt_oss",
               R"({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
          "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "num_hidden_layers": 24,
          "hidden_act": "silu", "swiglu_limit": 7.0})",
               {{2880, 2880, 32, 4, 24}},
               24,
               ActivationKind::kSwiGLUOAI},
        Family{"llama4",
               R"({"model_type": "llama4", "vision_config": {"hidden_size": 1408}, "text_config": {
          "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
          "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
          "num_hidden_layers": 48, "hidden_act": "silu"}})",
               {{5120, 8192, 128, 1, 24}},
               48},
        Family{"llama4_listed",
               R"({"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4,
          "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "moe_layers": [0, 2, 3],
          "num_hidden_layers": 4, "hidden_act": "silu"})",
               {{64, 32, 4, 1, 3}},
               4},
        Family{"ernie4_5_moe",
               R"({"hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
          "moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
          "moe_layer_interval": 1, "num_hidden_layers": 28, "hidden_act": "silu"})",
               {{2560, 1536, 64, 6, 27}},
               28},
        Family{"hunyuan_lists",
               R"({"hidden_size": 4096, "intermediate_size": 3072,
          "moe_intermediate_size": [3072, 3072, 1024, 1024], "num_experts": 64, "moe_topk": [8, 8, 8, 4],
          "num_hidden_layers": 4, "hidden_act": "silu"})",
               {{4096, 3072, 64, 8, 2}, {4096, 1024, 64, 8, 1}, {4096, 1024, 64, 4, 1}},
               4},
        Family{"longcat_flash",
               R"({"model_type": "longcat_flash", "hidden_size": 6144, "ffn_hidden_size": 12288,
          "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12,
          "num_layers": 28, "num_hidden_layers": 56, "hidden_act": "silu"})",
               {{6144, 2048, 512, 12, 28}},
               28},
        Family{"dbrx",
               R"({"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "ffn_config": {
          "ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}})",
               {{6144, 10752, 16, 4, 40}},
               40},
        Family{"jamba",
               R"({"hidden_size": 4096, "intermediate_size": 14336, "num_experts": 16,
          "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 32,
          "hidden_act": "silu"})",
               {{4096, 14336, 16, 2, 16}},
               32},
        Family{"lfm2_moe",
               R"({"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
          "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "num_hidden_layers": 24,
          "hidden_act": "silu", "layer_types": ["conv", "full_attention"]})",
               {{2048, 1792, 32, 4, 22}},
               24},
        Family{"nemotron_h_pattern",
               R"({"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856,
          "moe_intermediate_size": 1856, "n_routed_experts": 128, "num_experts_per_tok": 6,
          "hybrid_override_pattern": "MEM*EME-", "num_hidden_layers": 8, "mlp_hidden_act": "relu2",
          "mamba_hidden_act": "silu"})",
               {{2688, 1856, 128, 6, 3}},
               8,
               ActivationKind::kReLU2},
        Family{"nemotron_h_latent",
               R"({"hidden_size": 4096, "moe_latent_size": 1024, "moe_intermediate_size": 2688,
          "n_routed_experts": 512, "num_experts_per_tok": 22, "mlp_hidden_act": "relu2",
          "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]})",
               {{1024, 2688, 512, 22, 2}},
               5,
               ActivationKind::kReLU2},
        Family{"arctic",
               R"({"hidden_size": 7168, "intermediate_size": 4864, "num_local_experts": 128,
          "num_experts_per_tok": 2, "moe_layer_frequency": 2, "num_hidden_layers": 5, "hidden_act": "silu"})",
               {{7168, 4864, 128, 2, 2}},
               5},
        Family{"layer_mask",
               R"({"hidden_size": 64, "moe_intermediate_size": 32, "num_local_experts": 4,
          "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1, 0], "num_hidden_layers": 4, "hidden_act": "silu"})",
               {{64, 32, 4, 2, 2}},
               4},
        Family{"gemma4",
               R"({"model_type": "gemma4", "text_config": {"hidden_size": 2816, "intermediate_size": 2112,
          "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
          "num_hidden_layers": 30, "hidden_activation": "gelu_pytorch_tanh"}, "audio_config": null})",
               {{2816, 704, 128, 8, 30}},
               30,
               ActivationKind::kGeGLUTanh},
        Family{"sparse_layers_named",
               R"({"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
          "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3,
          "hidden_act": "silu", "swiglu_limit": 10.0})",
               {{64, 32, 8, 2, 2}},
               3,
               ActivationKind::kSwiGLUClamp}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ModelConfig, DTypeBiasesAndWeightPosition) {
  const cli::ModelConfig oss = cli::read_model_config(temporary_file("oss.json", R"({"model_type": "gpt_oss",
    "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "torch_dtype": "float16"})"));
  EXPECT_TRUE(oss.has_b_up && oss.has_b_down);
  EXPECT_EQ(oss.dtype, DType::kF16);
  EXPECT_EQ(oss.notes.size(), 1U);  // n from intermediate_size
  const cli::ModelConfig llama =
      cli::read_model_config(temporary_file("llama.json", R"({"model_type": "llama4",
    "dtype": "bfloat16", "text_config": {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2}})"));
  EXPECT_EQ(llama.weight_position, WeightPosition::kBefore);
  EXPECT_EQ(llama.dtype, DType::kBF16);
  EXPECT_FALSE(llama.activation.has_value());
}

struct BadConfig {
  const char* name;
  const char* json;
  const char* sentence;
};
void PrintTo(const BadConfig& config, std::ostream* out) {
  *out << config.name;
}

class BadConfigTest : public testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, NamesFileKeyAndValue) {
  const std::string path = temporary_file("bad.json", GetParam().json);
  const ToolResult result = run_tool("plan " + path + " --tokens 8");
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.rfind("moestro: " + path + ": ", 0), 0U) << result.err;
  EXPECT_NE(result.err.find(GetParam().sentence), std::string::npos) << result.err;
}

#define MOESTRO_REST \
  R"("hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "hidden_act": "silu"})"
INSTANTIATE_TEST_SUITE_P(
    Table, BadConfigTest,
    testing::Values(
        BadConfig{"Empty", "", "not JSON: parse error at line 1"},
        BadConfig{"Cut", R"({"num_experts": 8,)", "not JSON: parse error at line 1, column 19"},
        BadConfig{"List", "[1, 2]", "holds a JSON array, expected an object"},
        BadConfig{"Dense", R"({"model_type": "llama", )" MOESTRO_REST,
                  "no number of experts (is this a dense model?)"},
        BadConfig{"NoTopK", R"({"num_experts": 8, )" MOESTRO_REST,
                  "no number of experts per token: looked for num_experts_per_tok,"},
        BadConfig{
            "NoWidth",
            R"({"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "num_hidden_layers": 2})",
            "no expert width: looked for moe_intermediate_size,"},
        BadConfig{"NoModelDimension",
                  R"({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64})",
                  "no model dimension: looked for"},
        BadConfig{
            "NoLayers",
            R"({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 8})",
            "no number of layers: looked for num_hidden_layers"},
        BadConfig{"ExpertsAreText", R"({"num_experts": "8", "num_experts_per_tok": 2, )" MOESTRO_REST,
                  "num_experts is \"8\", expected a whole number from 1"},
        BadConfig{"ExpertsAreAFraction", R"({"num_experts": 8.5, "num_experts_per_tok": 2, )" MOESTRO_REST,
                  "num_experts is 8.5, expected a whole number from 1"},
        BadConfig{"ExpertsAreNegative", R"({"num_experts": -8, "num_experts_per_tok": 2, )" MOESTRO_REST,
                  "num_experts is -8, expected a whole number from 1"},
        BadConfig{"ExpertsAreHuge", R"({"num_experts": 1e300, "num_experts_per_tok": 2, )" MOESTRO_REST,
                  "expected a whole number from 1"},
        BadConfig{"ListTooShort", R"({"num_experts": [8], "num_experts_per_tok": 2, )" MOESTRO_REST,
                  "num_experts lists 1 layers, expected 2"},
        BadConfig{"AllDense",
                  R"({"num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 2, )" MOESTRO_REST,
                  "none of its 2 layers has experts"},
        BadConfig{"MoeSwitchedOff",
                  R"({"num_experts": 8, "num_experts_per_tok": 2, "enable_moe_block": false, )" MOESTRO_REST,
                  "enable_moe_block is false"},
        BadConfig{"UnknownActivation",
                  R"({"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32,
                      "num_hidden_layers": 2, "hidden_act": "mish"})",
                  "the activation 'mish' is not known; name one with --activation"},
        BadConfig{"ActivationIsANumber",
                  R"({"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32,
                      "num_hidden_layers": 2, "hidden_act": 3})",
                  "hidden_act is not a string"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ModelConfig, MoreChoicesThanExpertsIsRefused) {
  const std::string path =
      temporary_file("k.json", R"({"num_experts": 2, "num_experts_per_tok": 4, )" MOESTRO_REST);
  const ToolResult result = run_tool("plan " + path + " --tokens 8");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("expected at most E = 2"), std::string::npos) << result.err;
}

TEST(ModelConfig, GivenOptionsReplaceTheFile) {
  const std::string path =
      temporary_file("mish.json", R"({"num_experts": 8, "num_experts_per_tok": 2, )" MOESTRO_REST);
  const ToolResult result =
      run_tool("plan " + path + " --tokens 8 --top-k 3 --dtype f32 --activation relu --layers 7");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("7 x T 8, d 64, n 32, E 8, K 3, relu, f32"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace moestro::test
