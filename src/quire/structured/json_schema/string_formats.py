"""The formats of strings that are enforced, as patterns: RFC 3339, 3986, 3987, 4122, 5321, 6570, 6901."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

_LEAP_YEARS = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # no year 0000
)


def _dates() -> str:
    year = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
    long_months, short_months = "(?:0[13578]|1[02])", "(?:0[469]|11)"
    days = f"{long_months}-(?:0[1-9]|[12][0-9]|3[01])|{short_months}-(?:0[1-9]|[12][0-9]|30)"
    days += "|02-(?:0[1-9]|1[0-9]|2[0-8])"
    return f"(?:{year}-(?:{days})|{_LEAP_YEARS}-02-29)"


def _times() -> str:
    """Leap seconds end a day of UTC; offsets that are in use, by whole and half hours and :45, may have them."""
    fraction, offset = "(?:\\.[0-9]+)?", "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    leaps = [f"23:59:60{fraction}[zZ]"]
    for offset_minutes in (60 * hours + minutes for hours in range(24) for minutes in (0, 30, 45)):
        zone = f"{offset_minutes // 60:02}:{offset_minutes % 60:02}"
        for sign, local in (("\\+", 1439 + offset_minutes), ("-", 1439 - offset_minutes)):
            leaps.append(f"{local // 60 % 24:02}:{local % 60:02}:60{fraction}{sign}{zone}")
    return f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{fraction}{offset}|{'|'.join(leaps)})"


def _duration() -> str:
    time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
    date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    return f"P(?:{date}(?:{time})?|{time}|[0-9]+W)"


_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"
# A label with hyphens at its third and fourth place says that it is encoded, and no pattern can check the encoding.
_LETTER, _INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = (
    f"(?:{_LETTER}(?:{_INNER}{{0,2}}{_LETTER})?"
    f"|{_LETTER}{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})"
)
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"
    last = f"(?:{group}:{group}|{_IPV4})"
    options = [f"(?:{group}:){{6}}{last}", f"::(?:{group}:){{5}}{last}"]
    for before in range(1, 8):
        head = f"(?:(?:{group}:){{0,{before - 1}}}{group})?::"
        tail = {6: group, 7: ""}.get(before, f"(?:{group}:){{{5 - before}}}{last}")
        options.append(head + tail)
    return f"(?:{'|'.join(options)})"


def _email() -> str:
    atom = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
    quoted = '"(?:[ !#-\\[\\]-~]|\\\\[ -~])*"'
    return f"(?:{atom}(?:\\.{atom})*|{quoted})@(?:{_HOSTNAME}|\\[(?:{_IPV4}|IPv6:{_ipv6()})\\])"


def _uri(*, international: bool, relative: bool) -> str:
    more = "\\u00A0-\\uD7FF\\uF900-\\uFDCF\\uFDF0-\\uFFEF"
    more += "".join(f"\\u{{{plane:X}0000}}-\\u{{{plane:X}FFFD}}" for plane in range(1, 14))
    letters = "a-zA-Z0-9._~" + (more if international else "")
    private = "\\uE000-\\uF8FF\\u{F0000}-\\u{FFFFD}\\u{100000}-\\u{10FFFD}" if international else ""
    marks, percent = "!$&'()*+,;=", "%[0-9a-fA-F]{2}"
    char = f"(?:[{letters}{marks}:@-]|{percent})"
    user, name = f"(?:[{letters}{marks}:-]|{percent})*", f"(?:[{letters}{marks}-]|{percent})*"
    address = f"\\[(?:{_ipv6()}|[vV][0-9a-fA-F]+\\.[a-zA-Z0-9._~{marks}:-]+)\\]"
    authority = f"(?:{user}@)?(?:{address}|{name})(?::[0-9]*)?"
    absolute = f"/(?:{char}+(?:/{char}*)*)?"
    hierarchy = f"(?://{authority}(?:/{char}*)*|{absolute}|{char}+(?:/{char}*)*|)"
    end = f"(?:\\?(?:{char}|[/?{private}])*)?(?:#(?:{char}|[/?])*)?"
    whole = f"[a-zA-Z][a-zA-Z0-9+.-]*:{hierarchy}{end}"
    if not relative:
        return whole
    first = f"(?:[{letters}{marks}@-]|{percent})+"
    return f"(?:{whole}|(?://{authority}(?:/{char}*)*|{absolute}|{first}(?:/{char}*)*|){end})"


def _uri_template() -> str:
    name = "(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})(?:\\.?(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2}))*"
    variable = f"{name}(?::[1-9][0-9]{{0,3}}|\\*)?"
    other = '[^\\u0000- "%<>\\\\^`{|}\\u007F-\\u009F]|%[0-9a-fA-F]{2}'
    return f"(?:{other}|\\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\\}})*"


def _pointer() -> str:
    return "(?:/(?:[^~/]|~[01])*)*"


_FORMATS: dict[str, Callable[[], str]] = {
    "date-time": lambda: f"{_dates()}[tT]{_times()}",
    "date": _dates,
    "time": _times,
    "duration": _duration,
    "email": _email,
    "hostname": lambda: _HOSTNAME,
    "ipv4": lambda: _IPV4,
    "ipv6": _ipv6,
    "uri": lambda: _uri(international=False, relative=False),
    "uri-reference": lambda: _uri(international=False, relative=True),
    "iri": lambda: _uri(international=True, relative=False),
    "iri-reference": lambda: _uri(international=True, relative=True),
    "uri-template": _uri_template,
    "uuid": lambda: "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "json-pointer": _pointer,
    "relative-json-pointer": lambda: f"(?:0|[1-9][0-9]*)(?:#|{_pointer()})",
}
# Formats of older drafts and of OpenAPI that are another one's name, or that say nothing about the text.
_ALIASES = {"host-name": "hostname", "ip-address": "ipv4"}
FREE = frozenset({"password", "binary", "textarea", "multiline", "markdown"})
INTEGERS = {"int32": 31, "int64": 63}
FREE_NUMBERS = frozenset({"float", "double"})
NAMES = (*_FORMATS, *_ALIASES)
LONGEST = {"hostname": 253}


@cache
def format_pattern(name: str) -> str | None:
    """The pattern of a format, or None if it is not known."""
    make = _FORMATS.get(_ALIASES.get(name, name))
    return None if make is None else f"^(?:{make()})$"
