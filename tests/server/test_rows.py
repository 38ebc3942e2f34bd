"""The tests for each row of the list of bad inputs and faults (empty body … soak), so that none is forgotten.

In every file a second client streams the same seeded answer throughout or repeats it afterwards: its text never
changes; blocks and descriptors end where they were, in test_faults.py memory too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS: dict[int, tuple[str, ...]] = {
    1: ("bad_input::test_chat",),  # empty, not JSON
    2: ("bad_input::test_chat",),  # keys given twice
    3: ("bad_input::test_chat",),  # nested deeply
    4: ("bad_input::test_bodies_over_the_limit",),
    5: ("bad_input::test_bodies_that_are_not_plain_json",),  # compressed
    6: ("bad_input::test_bodies_that_are_not_plain_json",),  # content type
    7: ("bad_input::test_chat",),  # temperature of a wrong type
    8: ("bad_input::test_chat",),  # temperature out of range
    9: ("bad_input::test_chat",),  # top_p, top_k
    10: ("bad_input::test_chat", "api::test_chat_defaults_to_the_window"),  # max_tokens
    11: ("bad_input::test_chat", "bad_input::test_completions"),  # n, best_of
    12: ("bad_input::test_chat", "bad_input::test_completions", "bad_input::test_lists_are_bounded"),  # logprobs
    13: ("bad_input::test_chat", "bad_input::test_prompt_logprobs_are_bounded"),
    14: ("bad_input::test_chat",),  # stop strings
    15: ("bad_input::test_stop_equal_to_the_first_token_and_overlapping_stops",),
    16: ("bad_input::test_chat", "bad_input::test_edge_values_work"),  # seed
    17: ("bad_input::test_chat", "bad_input::test_lists_are_bounded"),  # logit_bias
    18: ("bad_input::test_chat",),  # penalties
    19: ("bad_input::test_chat",),  # every token banned
    20: ("bad_input::test_chat", "bad_input::test_completions"),  # nothing asked
    21: ("bad_input::test_chat",),  # roles and contents
    22: ("bad_input::test_chat", "bad_input::test_edge_values_work"),  # odd text
    23: ("api::test_control_tokens_in_a_users_text_are_text",),
    24: ("bad_input::test_completions", "bad_input::test_large_prompts_leave_the_event_loop_free"),
    25: ("bad_input::test_chat",),  # the tokenizer's worst cases
    26: ("bad_input::test_completions",),  # token ids
    27: ("bad_input::test_completions", "bad_input::test_edge_values_work"),  # the window
    28: ("bad_input::test_unknown_models_never_touch_disk_or_network",),
    29: ("bad_input::test_unknown_fields_can_be_refused", "bad_input::test_edge_values_work"),
    37: ("tools::test_wrong_tools_are_named",),
    38: ("tools::test_wrong_tools_are_named",),
    39: ("bad_input::test_chat", "../text/test_text_sandbox::*"),  # templates
    40: ("bad_input::test_chat",),  # template variables
    41: ("bad_input::test_chat",),  # addresses of images
    42: ("bad_input::test_chat",),  # prompt_embeds
    44: ("connections::test_keys", "connections::test_every_key_is_compared"),
    45: ("connections::test_routes_for_administrators_are_off_by_default",),
    46: ("connections::test_host_and_origin", "connections::test_listed_hosts_and_origins"),
    47: ("connections::test_malformed_requests",),  # headers
    48: ("connections::test_slow_headers_and_bodies_are_ended",
         "connections::test_many_slow_connections_do_not_keep_others_out"),
    49: ("connections::test_many_slow_connections_do_not_keep_others_out",),  # idle connections
    50: ("connections::test_a_client_that_never_reads_is_ended",
         "connections::test_a_slow_client_gets_everything_in_order"),
    51: ("connections::test_hanging_up_at_every_moment", "connections::test_hanging_up_on_a_whole_answer_ends_it"),
    52: ("connections::test_half_closing_counts_as_hanging_up", "connections::test_hanging_up_at_every_moment",
         "api::test_http_1_0_gets_a_whole_answer", "connections::test_pipelined_requests_are_answered_in_order"),
    53: ("connections::test_a_full_queue_says_when_to_come_back",
         "connections::test_connections_that_are_all_in_use_are_as_many_as_there_may_be"),
    54: ("api::test_request_ids", "bad_input::test_chat"),  # the same request id twice
    55: ("connections::test_a_repeated_request_gets_the_same_answer",
         "connections::test_a_repetition_during_the_first_request_waits"),
    56: ("bad_input::test_times_that_have_passed",),
    57: ("connections::test_a_flood_from_one_key_stops_at_its_share",),
    59: ("faults::test_a_killed_engine",),
    60: ("faults::test_a_stopped_engine",),
    61: ("faults::test_a_killed_server_leaves_nothing",),
    62: ("serve::test_start_serve_and_drain", "serve::test_a_second_signal_ends_at_once",
         "serve::test_tls_and_a_new_certificate", "serve::test_a_signal_while_loading_ends_the_start"),
    75: ("faults::test_clocks_that_jump",),
    84: ("serve::test_a_port_in_use", "serve::test_tls_and_a_new_certificate"),
    85: ("serve::test_unusable_options", "serve::test_unusable_config_files", "options::test_options_that_contradict"),
    86: ("serve::test_a_closed_log_does_not_matter",),
    87: ("metrics::test_labels_are_bounded", "metrics::test_a_storm_of_scrapes_is_rendered_a_few_times"),
    88: ("faults::test_everything_at_once",),
}  # fmt: skip
PROMISED = {*range(1, 30), *range(37, 43), *range(44, 58), *range(59, 63), 75, *range(84, 89)}


def functions(name: str) -> set[str]:
    path = HERE / f"{name}.py" if "/" in name else HERE / f"test_{name}.py"
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_test() -> None:
    assert set(ROWS) == PROMISED
    for row, tests in ROWS.items():
        for test in tests:
            name, _, function = test.partition("::")
            assert function == "*" or function in functions(name), f"row {row}: {test}"


def test_tests_of_bad_values_name_their_row() -> None:
    """Rows whose test is a table of bodies have an entry in it."""
    text = (HERE / "test_bad_input.py").read_text()
    entries = {int(row) for row in re.findall(r"^    \(\s*(\d+),", text, re.MULTILINE)}
    tables = {"bad_input::test_chat", "bad_input::test_completions"}
    assert {row for row, tests in ROWS.items() if tables & set(tests)} <= entries
