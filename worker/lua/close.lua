-- Let go of a job that has ended and whose dependents are queued. ARGV: queue, job id, execution id, now_iso
-- A job that was cancelled, or enqueued again under the same id, meanwhile is not ours to settle any more.
local taken_at = holds(queue, id, eid)
local is_ours = taken_at and not is_queued_again(queue, id, taken_at)
if redis.call('HGET', job, 'ended_by') == eid then
  local ended = redis.call('HMGET', job, 'ended_ttl', 'next_run', 'next_repeats_left')
  redis.call('HDEL', job, 'ended_by', 'ended_as', 'ended_ttl', 'next_run', 'next_repeats_left')
  if is_ours then settle(ended[1], ended[2] or '', ended[3] or '') end
end
let_go(queue, id, eid)
return 'done'
