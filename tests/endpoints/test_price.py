import pytest
from pydantic import ValidationError

from afm.endpoints.price import CachedTokenPrice, TokenPrice


def test_prices_are_for_a_million_tokens():
    assert TokenPrice(prompt=2.0, completion=8.0).usd(500_000, 250_000) == 3.0


def test_cached_tokens_of_the_prompt_have_a_price_of_their_own():
    assert CachedTokenPrice(prompt=4, completion=8, cached=1).usd(1_000_000, 0, 500_000) == 2.5
    assert CachedTokenPrice(prompt=4, completion=8).usd(1_000_000, 0, 500_000) == 4.0
    assert CachedTokenPrice(prompt=4, completion=8, cached=1).usd(1_000_000, 0, 2_000_000) == 1.0, (
        "no more than were read"
    )


@pytest.mark.parametrize("usd", [-1, float("nan"), float("inf"), 1e10])
def test_a_price_is_a_number_of_dollars_within_reason(usd):
    with pytest.raises(ValidationError, match="prompt"):
        TokenPrice(prompt=usd, completion=0)
    with pytest.raises(ValidationError, match="cached"):
        CachedTokenPrice(prompt=1, completion=1, cached=usd)
