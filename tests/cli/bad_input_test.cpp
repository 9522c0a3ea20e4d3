/// Bad input: one clear sentence on stderr, nothing on stdout, exit code 2.
#include <gtest/gtest.h>

#include <string>

#include "run_tool.hpp"

namespace moestro::test {
namespace {

struct BadInput {
  const char* name;
  const char* arguments;
  const char* sentence;  ///< stderr contains it
};
void PrintTo(const BadInput& input, std::ostream* out) {
  *out << input.arguments;
}

class BadInputTest : public testing::TestWithParam<BadInput> {};

TEST_P(BadInputTest, IsOneSentence) {
  const ToolResult result = run_tool(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2) << result.out << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find(GetParam().sentence), std::string::npos) << result.err;
  EXPECT_EQ(result.err.rfind("moestro: ", 0), 0U) << result.err;
}

INSTANTIATE_TEST_SUITE_P(
    Table, BadInputTest,
    testing::Values(
        BadInput{"NoSuchCommand", "trian",
                 "'trian' is none of the commands: info, verify, bench, plan, route"},
        BadInput{"RouteWithoutFile", "route", "FILE is required"},
        BadInput{"RouteNoSuchFile", "route no/such.npy", "cannot read 'no/such.npy'"},
        BadInput{"RouteOtherFile", "route ids.csv", "FILE is 'ids.csv', expected a .npy file"},
        BadInput{"NoSuchOption", "plan --tokenz 3", "--tokenz"},
        BadInput{"ShapeNotNumbers", "verify --shape 1,2,x,4,5", "--shape: '1,2,x,4,5' is not T,d,n,E,K"},
        BadInput{"ShapeEmpty", "verify --shape ''", "--shape"},
        BadInput{"ShapeTooShort", "verify --shape 1,2", "'1,2' has 2 numbers, expected five: T,d,n,E,K"},
        BadInput{"ShapeTrailingComma", "verify --shape 1,2,3,4,", "is not T,d,n,E,K"},
        BadInput{"ShapeFraction", "verify --shape 1.5,2,3,4,1", "is not T,d,n,E,K"},
        BadInput{"ShapeOverflow", "verify --shape 99999999999999999999,2,3,4,1", "is not T,d,n,E,K"},
        BadInput{"ZeroDimension", "verify --shape 4,0,3,4,1", "d (model dimension) is 0, expected 1 to"},
        BadInput{"NegativeTokens", "verify --shape=-4,8,3,4,1", "T (tokens) is -4, expected 0 to"},
        BadInput{"MoreChoicesThanExperts", "bench --shape 4,8,3,4,5",
                 "K (choices per token) is 5, expected at most E = 4"},
        BadInput{"TooManySlots", "plan --shape 1073741824,8,8,8,4",
                 "T*K is 4294967296, expected at most 2147483647"},
        BadInput{"BytesDoNotCount", "plan --shape 500000000,16777216,16777216,1048576,4 --layers 100000",
                 "more bytes than 64 bits can count"},
        BadInput{"ShapeAndPreset", "verify --shape 4,4,4,4,1 --preset conf1", "--preset"},
        BadInput{"NoSuchPreset", "bench --preset 7b", "'7b' is not a preset; there are: 1.4B-n256"},
        BadInput{"NoSuchActivation", "verify --activation swigloo", "'swigloo' is none of: swiglu, geglu"},
        BadInput{"NoSuchDType", "verify --dtype int8", "--dtype: 'int8' is none of: f32, f64, bf16, f16"},
        BadInput{"NoSuchPolicy", "verify --save some", "--save: 'some' is none of: preactivation, all, none"},
        BadInput{"NoSuchLayout", "verify --gate-layout other", "is none of: concatenated, interleaved"},
        BadInput{"NoSuchPosition", "verify --weight-position left", "is none of: after, before"},
        BadInput{"NoSuchBackend", "verify --backend tpu",
                 "--backend: 'tpu' is none of: reference, cpu, cuda"},
        BadInput{"NoSuchRouting", "verify --routing even", "is none of: uniform, zipf, one"},
        BadInput{"NoSuchStage", "bench --stage upp", "'upp' is none of: all, layer, router"},
        BadInput{"NoSuchPass", "bench --pass sideways", "is none of: all, forward, backward"},
        BadInput{"NoSuchCompetitor", "bench --compare torch", "is none of: conventional, sort"},
        BadInput{"CompareWithoutLayer", "bench --compare conventional --stage up", "needs --stage layer"},
        BadInput{"CompareWithoutDispatch", "bench --compare sort", "needs --stage dispatch"},
        BadInput{"PassThatNoStageHas", "bench --shape 4,4,4,2,1 --stage router --pass step",
                 "--pass step: none of the stages"},
        BadInput{"ConventionalInterleaved",
                 "bench --shape 4,4,4,2,1 --compare conventional --gate-layout interleaved",
                 "the conventional way is not written for --gate-layout interleaved"},
        BadInput{"NoRepeats", "bench --repeats 0", "--repeats"},
        BadInput{"OutFolderMissing", "bench --shape 4,4,4,2,1 --out /no/such/folder/x.jsonl",
                 "/no/such/folder/x.jsonl cannot be opened for appending"},
        BadInput{"SentinelsAboveOne", "verify --sentinels 1.5", "--sentinels"},
        BadInput{"LimitNotPositive", "verify --activation swiglu_oai --limit 0", "--limit"},
        BadInput{"PlanOfNothing", "plan", "missing --tokens, --d-model, --d-ff, --experts, --top-k"},
        BadInput{"PlanHalfTold", "plan --tokens 8 --d-model 8 --d-ff 8", "missing --experts, --top-k"},
        BadInput{"PlanWithoutTokens", "plan config.json", "--tokens is missing"},
        BadInput{"PlanNoFile", "plan /no/such/config.json --tokens 8", "/no/such/config.json: no such file"},
        BadInput{"PlanEmptyFolder", "plan /proc/self/fd --tokens 8", "config.json: no such file"},
        BadInput{"BudgetNotBytes", "plan --shape 8,8,8,8,1 --budget lots",
                 "--budget: 'lots' is not a number of bytes"},
        BadInput{"BudgetNegative", "plan --shape 8,8,8,8,1 --budget=-1GB", "is not a number of bytes"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(NoCommand, ShowsHelp) {
  const ToolResult result = run_tool("");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("Usage: moestro"), std::string::npos);
}

}  // namespace
}  // namespace moestro::test
