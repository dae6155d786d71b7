-- Let go of a job that has ended and whose dependents are queued. ARGV: queue, job id, execution id, now_iso
-- A job that was enqueued again meanwhile, under the same id, is not ours to settle any more.
local status = redis.call('HGET', job, 'status')
local has_ended = status == 'finished' or status == 'failed' or status == 'stopped'
if redis.call('HGET', job, 'ended_by') == eid then
  local ended = redis.call('HMGET', job, 'ended_ttl', 'next_run')
  redis.call('HDEL', job, 'ended_by', 'ended_ttl', 'next_run')
  if has_ended then settle(ended[1], ended[2] or '') else close_execution() end
else
  close_execution()
end
return 'done'
