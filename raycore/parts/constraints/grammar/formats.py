"""The formats of JSON Schema that are enforced, as regular expressions.

They allow only what validators accept, sometimes less: no leap seconds, and no years before 0001.
"""

from __future__ import annotations

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,28}[a-zA-Z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,6}}[a-zA-Z](?:[a-zA-Z0-9-]{{0,28}}[a-zA-Z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_HEX}:){{7}}{_HEX}",
        *(f"(?:{_HEX}(?::{_HEX}){{0,{before}}})?::(?:{_HEX}(?::{_HEX}){{0,{5 - before}}})?" for before in range(6)),
    ]
)
_CHARACTER = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_NUMBER = "[0-9]{1,9}"
_TIME_SPAN = f"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"

FORMATS = {
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": (
        f"P(?:(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)(?:{_TIME_SPAN})?"
        f"|{_TIME_SPAN}|{_NUMBER}W)"
    ),
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://(?:{_IPV4}|{_HOST})(?::[0-9]{{1,5}})?(?:/{_CHARACTER}*)*"
        rf"|/?(?:{_CHARACTER}+(?:/{_CHARACTER}*)*)?)(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?"
    ),
}
"""Regular expressions that match a whole string of the format, by the format's name."""
UNENFORCED_FORMATS = frozenset(
    {
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    }
)
"""The other formats of JSON Schema. Formats that it doesn't know, such as OpenAPI's `int32`, are annotations."""
