"""A decode engine and a prefill engine in virtual time, with a link between them that does its worst.

The engines do what the connector does, and no more: they carry values between `ReadBook`, `LeaseTable`,
`Seal` and the clock. Memory is a list of what each block holds; a block that comes home is overwritten in
the same instant, so that a read which outlives its claim by a nanosecond reads something else. The checks
look at memory, at tokens and at the answers, never at the machines' own state.
"""
