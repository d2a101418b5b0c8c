"""A recording in other forms: tables for SQL, CSV, JSON and Parquet, a timeline for Perfetto. No torch."""
