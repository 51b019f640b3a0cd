"""Names that TRL imports."""


class StructuredOutputsParams:
    """Only used when TRL generates by itself."""
