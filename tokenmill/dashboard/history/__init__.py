"""The history that charts show. It is in Redis, so it outlives workers and dashboards. It goes back one week."""
