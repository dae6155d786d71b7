-- Let go of a job that has ended and whose dependents are queued. ARGV: queue, job id, execution id
if redis.call('HGET', job, 'ended_by') == eid then
  local ttl = redis.call('HGET', job, 'ended_ttl')
  redis.call('HDEL', job, 'ended_by', 'ended_ttl')
  expire(ttl)
end
close_execution()
return 'done'
