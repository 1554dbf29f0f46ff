import random
import string

import pytest
from team_log import segments_of

from afm.distill.filters.patterns import PERSONAL, SECRETS
from afm.distill.filters.sensitive import PersonalSettings, SecretSettings, SensitiveFilter
from afm.trajectory import validate

_LETTERS = string.ascii_letters + string.digits
_DRAWN = random.Random(4)


def made(length, letters=_LETTERS):
    """Nobody's key: drawn while the test runs, so that none stands in a file."""
    return "".join(_DRAWN.choices(letters, k=length - 3)) + "aB3"


def made_hex(length):
    return "0a1b2c3d4e" + made(length - 7, "0123456789abcdef")[:-3]


SECRET_TEXTS = {
    "private key": lambda: "-----BEGIN RSA " + "PRIVATE KEY-----",
    "AWS key": lambda: "AKIA" + made(19, string.ascii_uppercase)[:16],
    "GitHub token": lambda: "ghp_" + made(36),
    "GitLab token": lambda: "glpat-" + made(20),
    "model API key": lambda: "sk-proj-" + made(48),
    "Hugging Face token": lambda: "hf_" + made(34),
    "Google key": lambda: "AIza" + made(35),
    "Slack token": lambda: "xoxb-" + made(24),
    "Stripe key": lambda: "sk_live_" + made(24),
    "package index token": lambda: "npm_" + made(36),
    "signed token": lambda: ".".join(("eyJ" + made(20), "eyJ" + made(20), made(30))),
    "address with password": lambda: "postgres://admin:" + made(9) + "@db.internal/main",
    "service token": lambda: "gsk_" + made(52),
    "chat service token": lambda: "110201543:AA" + made(33),
    "authorization header": lambda: "Authorization: Bearer " + made(40) + "1",
    "credential": lambda: f'api_key = "{made(24)}"',
    "credential in a setting": lambda: "export DB_PASSWORD=1" + made(24),
}
_HEX = "0123456789abcdef"
FURTHER_SECRETS = {
    "PGP": lambda: "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----",
    "AWS in a file": lambda: "aws_secret_access_key = 1" + made(39),
    "in the environment": lambda: "OPENAI_API_KEY=1" + made(32),
    "in an address": lambda: "https://api.host/v1?api_key=1" + made(32),
    "without user": lambda: "redis://:" + made(9) + "@cache:6379",
    "Google OAuth": lambda: "GOCSPX-" + made(28),
    "Slack hook": lambda: "https://hooks.slack.com/services/T0000/B0000/" + made(24),
    "SendGrid": lambda: ".".join(("SG", made(22), made(43))),
    "DigitalOcean": lambda: "dop_v1_" + _HEX * 4,
    "Shopify": lambda: "shpat_" + _HEX * 2,
    "xAI": lambda: "xai-" + made(70),
    "Perplexity": lambda: "pplx-" + made(48),
    "Replicate": lambda: "r8_" + made(37),
    "Vault": lambda: "hvs." + made(60),
    "Telegram in an address": lambda: f"https://api.telegram.org/bot110201543:AA{made(33)}/getMe",
    "Jina": lambda: "jina_" + made(60),
    "Twilio account": lambda: "AC" + _HEX * 2,
    "Discord": lambda: f"M{made(23)}.{made(6)}.{made(38)}",
    "Discord hook": lambda: f"https://discord.com/api/webhooks/{'123456789' * 2}/{made(68)}",
    "server token": lambda: "export CODE_SERVER_TOKEN=" + made_hex(32),
    "token in a program": lambda: f'headers = {{"server_token": "{made_hex(32)}"}}',
    "token without a name": lambda: "export TOKEN=" + made_hex(32),
    "token set by a program": lambda: f"os.environ['CODE_SERVER_TOKEN'] = '{made_hex(32)}'",
    "token in YAML": lambda: "  MY_OWN_TOKEN: " + made_hex(40),
    "Azure": lambda: "AccountKey=" + made(86) + "==",
    "basic": lambda: "Authorization: Basic " + "dXNlcjpwYXNzd29yZDEyMw==",
}
PERSONAL_TEXTS = {
    "e-mail": (
        "mara.lindqvist@vessby.se",
        "@property, a @ b.T",
        "someone@example.org",
        "git@vessby.se:a/b.git",
    ),
    "phone": ("+46 8 123 456 78", "10^9+1000000007", "2019-2020-2021", "+10 000 000 people", "+1 234 567"),
    "payment card": (
        "4111 5678 1234 5672",
        "4111567812345670",
        "0.4111567812345672",
        "4111 5678 1234 5672 1111",
    ),
    "account number": (
        "GB82 WEST 1234 5698 7654 32",
        "GB83 WEST 1234 5698 7654 32",
        "ZZ68 WEST 1234 5698 7654 32",  # the check digits of a country that there is not
    ),
    "IP address": (
        "81.23.145.7",
        "192.168.10.20",  # private
        "203.0.113.77",  # for documentation
        "8.8.8.8",
        "version 20.11.12.4",
        "181.23.145.256",
        "81.23.145.7.9",
        "81.23.145.0/24",
        "2001:db8::4:17",
        "2024:12:30:45",
        "std::vector",
    ),
    "social security number": (
        "536-22-8714",
        "123-45-6789",  # nobody's
        "666-22-8714",
        "536-00-8714",
        "536-22-0000",
        "1536-22-8714",
        "2019-05-2021",
    ),
}


def secrets(wiki, **settings):
    return SensitiveFilter(wiki, SecretSettings(**settings))


def personal(wiki, **settings):
    return SensitiveFilter(wiki, PersonalSettings(**settings))


def test_every_kind_has_its_text_here():
    assert set(SECRET_TEXTS) == {pattern.kind for pattern in SECRETS}
    assert set(PERSONAL_TEXTS) == {pattern.kind for pattern in PERSONAL}


@pytest.mark.parametrize("kind", SECRET_TEXTS)
def test_a_secret_is_caught_and_never_shown(wiki, row, kind):
    done = secrets(wiki).apply(row(thought=f"I use {SECRET_TEXTS[kind]()} for that."))
    assert (done.kept, done.reason) == (False, f"secrets: {kind} in <think>")


@pytest.mark.parametrize("name", FURTHER_SECRETS)
def test_secrets_of_many_services_are_caught(wiki, row, name):
    assert not secrets(wiki).apply(row(thought=f"Here: {FURTHER_SECRETS[name]()} is it.")).kept


@pytest.mark.parametrize(
    "text",
    [
        "api_key = 'YOUR_API_KEY_HERE'",
        "md5 0a1b2c3d4e0f9e8d7c6b5a4f3e2d1c0b and sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "SHA256=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "commit=0a1b2c3d4e0f9e8d7c6b5a4f3e2d1c0b9a8f7e6d, ETAG: 0a1b2c3d4e0f9e8d7c6b5a4f3e2d1c0b",
        "SESSION=123e4567-e89b-12d3-a456-426614174000",
        "ID_TOKEN=os.environ, PAD_TOKEN=<|endoftext|>, MAX_TOKEN=32768, next_token = tokens[position1]",
        "CODE_SERVER_TOKEN=00000000000000000000000000000000",
        "CODE_SERVER_TOKEN=$(openssl rand -hex 16)",
        "TOKEN da39a3ee5e6b4b0d3255bfef95601890afd80709z, TOKENS=0a1b2c3d4e0f9e8d7c6b5a4f3e2d1c0b",
        "jina_embeddings_v3_small_multilingual_retrieval_passage",
        "12345678:Another-long-title-of-a-page-in-a-l",
        "MODULE.models.some_function_with_a_long_name_in_it",
        "SKETCH0123456789abcdef0123456789abcd and ACDC0123456789abcdef0123456789abcd",
        'api_key = "YOUR_API_KEY_1234"',
        "sk-learn is a package",
        "password: hunter2",
        "API_KEY=os.environ['MY_SERVICE_API_KEY_2']",
        "api_key=settings.service2.api_key_of_2(1)",
        "Authorization: Bearer YOUR_TOKEN_1_GOES_HERE",
        "secret = number_of_the_secret_room",
        "the answer = 42, the password = unknown to everybody in 1944",
    ],
)
def test_words_and_placeholders_are_no_secrets(wiki, row, text):
    assert secrets(wiki).apply(row(thought=text)).kept


@pytest.mark.parametrize("kind", PERSONAL_TEXTS)
def test_personal_data_is_caught_and_its_neighbour_is_not(wiki, row, kind):
    text, *harmless = PERSONAL_TEXTS[kind]
    stage = personal(wiki)

    assert stage.apply(row(thought=f"It is {text} there.")).reason == f"personal: {kind} in <think>"
    for other in harmless:
        assert stage.apply(row(thought=f"It is {other} there.")).kept


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("+44 (0)20 7946 0958", "phone"),
        ("+1-202-555-0143", "phone"),
        ("NO93 8601 1117 947", "account number"),
        ("2a02:810d:4bc0:1f::17", "IP address"),
        ("http://81.23.145.7", ""),
        ("3714 496353 98431", "payment card"),
        ("3530 1113 3330 0000", "payment card"),  # JCB
        ("3056 930902 5904", "payment card"),  # Diners Club
        ("6200000000000005", "payment card"),  # UnionPay
        ("30569309025905", ""),
        ("curator@vessby.museum", "e-mail"),
        ("j\u00fcrgen@firma.de", "e-mail"),
        ("mara@v\u00e4ssby.se", "e-mail"),
        ("\u043c\u0430\u0440\u0430@\u0432\u0435\u0441\u0431\u0438.\u0440\u0444", "e-mail"),
        ("weights@value.shape", ""),
    ],
)
def test_other_spellings_of_personal_data(wiki, row, text, kind):
    found = personal(wiki).apply(row(thought=f"It is {text}, there.")).reason

    assert found == (f"personal: {kind} in <think>" if kind else "")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"question": "Who is a@b.org?"}, "the question"),
        ({"queries": ("who is a@b.org",)}, "<wiki_search>"),
        ({"found": "Write to a@b.org."}, "<observation>"),
        ({"answer": "a@b.org"}, "<answer>"),
    ],
)
def test_masking_never_touches_what_others_vouch_for(wiki, row, fields, where):
    done = personal(wiki, action="mask").apply(row(**fields))
    assert done.reason.startswith(f"personal: e-mail in {where}")


def test_masking_replaces_what_the_agent_thought(wiki, row):
    tokens = {"response_ids": (1, 2), "response_mask": (1, 1), "logprobs": (0.0, 0.0)}
    record = row(thought="Mail a@b.org or c@d.net first.", **tokens)

    done = personal(wiki, action="mask").apply(record)

    assert done.kept
    assert done.text == record.text.replace("a@b.org", "[e-mail]").replace("c@d.net", "[e-mail]")
    assert done.provenance["masked"] == {"e-mail": 2}
    assert (done.response_ids, done.response_mask, done.logprobs) == (None, None, None)
    assert not validate(segments_of(done), wiki)


def test_what_a_tool_returned_beyond_what_the_agent_saw_is_searched_too(wiki, row):
    record = row()
    more = record.calls[0].model_copy(update={"observation": "cut off here: a@b.org"})
    record = record.model_copy(update={"calls": (more, *record.calls[1:])})

    assert personal(wiki).apply(record).reason == "personal: e-mail in what wiki_search returned"
    assert personal(wiki, observations=False).apply(record).kept
    assert personal(wiki, observations=False).apply(row(found="Write to a@b.org.")).kept


def test_what_is_allowed_is_no_finding(wiki, row):
    stage = personal(wiki, allow=(r".*@b\.org",))

    assert stage.apply(row(thought="a@b.org")).kept
    assert not stage.apply(row(thought="a@b.org and a@c.org")).kept


def test_kinds_are_chosen_and_unknown_ones_refused(wiki, row):
    assert personal(wiki, kinds=("phone",)).apply(row(thought="a@b.org")).kept
    with pytest.raises(ValueError, match="did you mean 'e-mail'"):
        PersonalSettings(kinds=("email",))


@pytest.mark.parametrize(
    "unit",
    [
        "+" + "1" * 40,
        "-eyJ",
        "a.",
        "4111 ",
        "GB82 WEST ",
        "sk-a-",
        "://a:",
        "(111) ",
        "secret: '",
        "12345678:",
    ],
)
def test_hostile_texts_cost_no_more_than_their_length(unit):
    """200 kB of each, in a moment; a pattern that backtracks would take hours."""
    text = "ghp_ @ xox AIza hf_ AKIA " + unit * (200_000 // len(unit))

    for pattern in (*SECRETS, *PERSONAL):
        assert len(list(pattern.spans(text))) <= len(text)
