"""What the charts show: it stands in Redis for a week, in a fixed size, and outlives workers and dashboards."""
