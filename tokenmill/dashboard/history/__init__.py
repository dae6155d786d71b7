"""The history that charts show. Redis keeps it for a week in a fixed size, so it outlives workers and dashboards."""
