"""An engine whose reports come as late as those of a GPU, in any order of events."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from late_reports import late_reports  # noqa: E402
from serving_case import ids_of, make_engine, run_checked, small_model  # noqa: E402


def test_samples_that_score_their_prompt_again_meanwhile_do_not_change_its_scores() -> None:
    """The second sample starts before it is known that the first has scored the whole prompt."""

    def scores(lag: int) -> list[list[float | None]]:
        with make_engine(
            small_model(), block_size=8, lag=lag, max_num_batched_tokens=20
        ) as engine:
            engine.add_request(
                ids_of(20, 3),
                max_new_tokens=8,
                request_id="a",
                do_sample=True,
                num_return_sequences=2,
                prompt_logprobs=True,
            )
            outputs = run_checked(engine).values()
        return [list(out.prompt_logprobs or ()) for out in outputs]

    with late_reports(lambda: False) as device:
        late = scores(lag=4)
    assert device.num_late and len(late[0]) == 20
    assert late == scores(lag=0)
