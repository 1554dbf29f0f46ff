from afm.evaluation.best_of import BestOfSettings, choose
from afm.evaluation.judging import AgreementSettings, agree

SECRETS = (b"question of", b"right", b"wrong", b"It fits", b"As compared")


async def test_what_judges_add_to_a_sealed_run_tells_nothing(finished, judge) -> None:
    folder = finished({"a": ["right yes", "wrong no", "bad"], "b": ["wrong", "right", "bad"]}, seal="canary")
    chosen = await choose(folder, BestOfSettings.model_validate({"judge": {"attempts": 1}}))
    assert chosen.best_of[0].asked == 2
    judged = await agree(folder, AgreementSettings.model_validate({"judges": [{"attempts": 1}]}))
    assert judged.agreement[0].episodes == 6
    assert any("question of a" in str(request) for request in judge.requests)  # the judge has to see it
    for name in ("choices.jsonl", "opinions.jsonl", "metrics.json"):
        data = (folder / name).read_bytes()
        assert [secret for secret in SECRETS if secret in data] == [], name
