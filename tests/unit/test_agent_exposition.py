"""What is read from an engine's Prometheus text, in the shapes that vLLM has had."""

import pytest

from workers.agent.exposition import CacheShape, read_cache, read_incarnation

OLDER = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="False",engine="0",num_gpu_blocks="1000"} 1.0
"""
NEWER = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="784",cache_dtype="auto",enable_prefix_caching="True",engine="0",kv_cache_size_tokens="1209244",mamba_cache_mode="align",num_gpu_blocks="8192"} 1.0
"""
TWO_RANKS = NEWER + NEWER.splitlines()[1].replace('engine="0"', 'engine="1"') + "\n"


@pytest.mark.parametrize(
    ("exposition", "shape"),
    [
        (OLDER, CacheShape(16, 16_000, False, "fp8")),
        (NEWER, CacheShape(784, 1_209_244, True, "auto")),
        (TWO_RANKS, CacheShape(784, 2 * 1_209_244, True, "auto")),
        ("", CacheShape(None, None, None, None)),
        (OLDER.replace('"1000"', '"None"'), CacheShape(16, None, False, "fp8")),
        (TWO_RANKS.replace('"784"', '"32"', 1), CacheShape(None, 2 * 1_209_244, True, "auto")),
        (
            TWO_RANKS.replace('"1209244"', '"None"', 1).replace('"8192"', '"0"', 1),
            CacheShape(784, None, True, "auto"),
        ),
        ("vllm:cache_config_info{ torn", CacheShape(None, None, None, None)),
    ],
)
def test_reads_the_cache_as_the_engine_states_it(exposition, shape) -> None:
    assert read_cache(exposition) == shape


@pytest.mark.parametrize(
    ("exposition", "start_ms"),
    [
        ('process_start_time_seconds 1.5\nvllm:prompt_tokens_created{engine="0"} 9.0\n', 1500),
        (
            'vllm:prompt_tokens_created{engine="1"} 9.0\nvllm:prompt_tokens_created{engine="0"} 8.0\nvllm:a_created 1.0\n',
            8000,
        ),
        (
            'vllm:num_preemptions_created{engine="0"} 7.25\nvllm:request_success_created{finished_reason="stop"} 7.5\n',
            7250,
        ),
    ],
)
def test_names_a_life_by_its_start(exposition, start_ms) -> None:
    assert read_incarnation(exposition) == f"{start_ms:x}"


@pytest.mark.parametrize("exposition", ["", NEWER, "process_start_time_seconds soon\n", 'vllm:x_created{a="_created"'])
def test_knows_no_life_without_a_start(exposition) -> None:
    assert read_incarnation(exposition) is None
