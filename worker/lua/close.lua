-- Let go of a job that has ended and whose dependents are queued. ARGV: queue, job id, execution id, now_iso
if redis.call('HGET', job, 'ended_by') == eid then
  local ended = redis.call('HMGET', job, 'ended_ttl', 'next_run')
  redis.call('HDEL', job, 'ended_by', 'ended_ttl', 'next_run')
  settle(ended[1], ended[2] or '')
else
  close_execution()
end
return 'done'
