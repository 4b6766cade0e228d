"""What a run was and how it went: reads its record and writes it as one file, or compares several. May import diagnose
and below."""
