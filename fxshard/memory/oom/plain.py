"""Pickles of plain values: dictionaries, lists, tuples, texts and numbers, and nothing else.

Anybody may have written a snapshot, and `pickle` runs what a file says. Refusing its classes is not
enough: 15 bytes make CPython's unpickler fill gigabytes (the index of a LONG_BINPUT is the size of
its table). So the few opcodes that plain values need are read here, and no others.
"""

from __future__ import annotations

import pickletools
import re
import struct
from typing import Any, Final

from fxshard.errors import ConfigError

FIRST_PROTOCOL = 2

# Frames of a stack are references to frames that were written before: most of a snapshot is runs of
# these two opcodes, read at once.
_NEAR = re.compile(rb"(?:h[\x00-\xff])+")  # BINGET
_FAR = re.compile(rb"(?:j[\x00-\xff]{4})+")  # LONG_BINGET

_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS: Final = {  # opcode -> form of the number after it
    ord("K"): struct.Struct("<B"),
    ord("M"): struct.Struct("<H"),
    ord("J"): struct.Struct("<i"),
    ord("G"): struct.Struct(">d"),
}
_SIZED: Final = {  # opcode -> form of the size after it, and whether it is text (else bytes)
    0x8C: (struct.Struct("<B"), True),
    ord("X"): (struct.Struct("<I"), True),
    0x8D: (struct.Struct("<Q"), True),
    ord("C"): (struct.Struct("<B"), False),
    ord("B"): (struct.Struct("<I"), False),
    0x8E: (struct.Struct("<Q"), False),
}
_PUTS: Final = {ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")}
_TUPLES: Final = {ord(")"): 0, 0x85: 1, 0x86: 2, 0x87: 3}
_NAMES: Final = {ord(each.code): each.name for each in pickletools.opcodes}


def loads(data: bytes) -> Any:
    """The value in a pickle of protocol 2 or later.

    Raises:
        ConfigError: it is truncated or altered, no pickle, or holds more than plain values.
    """
    if data[:1] != b"\x80" or len(data) < 2 or data[1] < FIRST_PROTOCOL:
        raise ConfigError("this is no pickle of protocol 2 or later")
    try:
        return _value(data)
    except ConfigError:  # is a ValueError
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ConfigError("the pickle is truncated or was altered") from error


def _value(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 2
    while True:
        code = data[at]
        at += 1
        if code == 0x6A or code == 0x68:  # j, h
            run = (_FAR if code == 0x6A else _NEAR).match(data, at - 1)
            if run is None:
                raise ValueError("a reference without its number")
            far = "<" + "xI" * (len(run[0]) // 5)
            places = struct.unpack(far, run[0]) if code == 0x6A else run[0][1::2]
            stack += [memo[place] for place in places]
            at = run.end()
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code in _NUMBERS:
            form = _NUMBERS[code]
            stack.append(form.unpack_from(data, at)[0])
            at += form.size
        elif code in _SIZED:
            form, is_text = _SIZED[code]
            start = at + form.size
            at = start + form.unpack_from(data, at)[0]
            if at > len(data):
                raise ValueError("a text that ends after the file")
            text = data[start:at]
            stack.append(text.decode("utf-8", "surrogatepass") if is_text else text)
        elif code == 0x8A:  # LONG1
            start, at = at + 1, at + 1 + data[at]
            stack.append(int.from_bytes(data[start:at], "little", signed=True))
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == 0x75 or code == 0x73:  # SETITEMS, SETITEM
            items = _popped(stack, marks.pop() if code == 0x75 else len(stack) - 2)
            _target(stack, dict).update(zip(items[::2], items[1::2], strict=True))
        elif code == 0x65 or code == 0x61:  # APPENDS, APPEND
            items = _popped(stack, marks.pop() if code == 0x65 else len(stack) - 1)
            _target(stack, list).extend(items)
        elif code == 0x74 or code in _TUPLES:  # TUPLE, and those of a known size
            start = marks.pop() if code == 0x74 else len(stack) - _TUPLES[code]
            stack.append(tuple(_popped(stack, start)))
        elif code in _PUTS:
            memo[_PUTS[code].unpack_from(data, at)[0]] = stack[-1]
            at += _PUTS[code].size
        elif code == 0x95:  # FRAME: how many bytes belong together
            at += 8
        elif code == 0x2E:  # STOP
            if len(stack) != 1:
                raise ValueError("more than one value")
            return stack[0]
        elif code in _NAMES:
            raise ConfigError(
                f"the pickle holds more than plain values ({_NAMES[code]}): it may run code when "
                f"it is loaded, and a snapshot of torch never has that"
            )
        else:
            raise ValueError("no opcode")


def _popped(stack: list[Any], start: int) -> list[Any]:
    """Take what is on the stack from `start` on."""
    if not 0 <= start <= len(stack):
        raise ValueError("a mark that is gone")
    items = stack[start:]
    del stack[start:]
    return items


def _target(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"{type(stack[-1])} in the place of a {kind}")
    return stack[-1]
