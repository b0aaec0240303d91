"""An engine's page of metrics, as vLLM 0.32 writes it and as others do."""

import pytest

from proxy.fleet.exposition import EnginePage, read_page
from proxy.fleet.registry import EngineLoad

CONFIG = (
    'vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",'
    'effective_attention_block_size="32",enable_prefix_caching="True",engine="%s",gpu_memory_utilization="0.9",'
    'kv_cache_size_tokens="262144",mamba_cache_mode="none",num_gpu_blocks="8192",num_gpu_blocks_override="None",'
    'prefix_caching_hash_algo="sha256_cbor",user_specified_block_size="True"} 1.0\n'
)
PAGE = (
    """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11234.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79603901955e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 7.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 417.0
# HELP vllm:prompt_tokens_created Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7960390258e+09
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.05
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
"""
    + CONFIG % 0
)
NOTHING = EnginePage(EngineLoad(), None, None, None, None, None)


def test_a_page_of_vllm():
    assert read_page(PAGE) == EnginePage(EngineLoad(3, 2, 0.25), 32, 262_144, True, "auto", "1796039019.550")


@pytest.mark.parametrize(
    "text", ["", "\n", "# HELP x y\n", "go_goroutines 5\n", "<html>not found</html>", "vllm_x 1\n"]
)
def test_a_page_of_something_else_says_nothing(text):
    assert read_page(text) == NOTHING


def test_ranks_are_taken_together():
    ranks = PAGE + CONFIG % 1
    for name, value in (("num_requests_running", 4), ("num_requests_waiting", 1), ("kv_cache_usage_perc", 0.75)):
        ranks += f'vllm:{name}{{engine="1",model_name="tiny"}} {value}\n'
    read = read_page(ranks)
    assert read.load == EngineLoad(7, 3, 0.5)
    assert (read.block_tokens, read.capacity_tokens) == (32, 524_288)


def test_without_a_size_in_tokens_the_blocks_are_counted():
    assert read_page(PAGE.replace('kv_cache_size_tokens="262144",', "")).capacity_tokens == 32 * 8192
    assert read_page(PAGE.replace('"262144"', '"None"').replace('"8192"', '"None"')).capacity_tokens is None


@pytest.mark.parametrize(("written", "read"), [("True", True), ("False", False), ("None", None)])
def test_prefix_caching_is_on_off_or_unknown(written, read):
    page = PAGE.replace('enable_prefix_caching="True"', f'enable_prefix_caching="{written}"')
    assert read_page(page).prefix_caching is read


@pytest.mark.parametrize("odd", ["None", "", "NaN", "+Inf", "x"])
def test_a_block_size_that_is_no_number_is_unknown(odd):
    assert read_page(PAGE.replace('block_size="32"', f'block_size="{odd}"')).block_tokens is None


def test_the_start_is_named_by_what_there_is():
    without = PAGE.replace("process_start_time_seconds 1.79", "other_start_time_seconds 1.79")
    assert read_page(without).started == "1796039025.800"
    assert read_page(without.replace("prompt_tokens_created", "prompt_tokens_begun")).started is None


def test_the_number_of_a_life_does_not_depend_on_the_order_of_ranks():
    later = 'vllm:prompt_tokens_created{engine="1"} 1.7960390299e+09\n'
    without = PAGE.replace("process_start_time_seconds 1.79", "other_start_time_seconds 1.79")
    assert read_page(without + later).started == read_page(later + without).started == "1796039025.800"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_gauge_that_is_no_number_is_unknown(value):
    read = read_page(PAGE.replace('model_name="tiny"} 3.0', f'model_name="tiny"}} {value}'))
    assert read.load.running is None


@pytest.mark.parametrize(
    "line", ["vllm:num_requests_running{engine=", "vllm:num_requests_running x", "vllm:cache_config_info{a} 1"]
)
def test_a_broken_line_is_a_value_error(line):
    with pytest.raises(ValueError):
        read_page(PAGE + line + "\n")
