"""How models write reasoning and tool calls: data for each format, parsed, written and enforced."""
