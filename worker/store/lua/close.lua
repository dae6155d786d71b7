-- Let go of a job that has ended and whose dependents are queued. It takes the first four arguments of
-- end_execution.lua. A job that was cancelled, or enqueued again under its id, in the meantime is not ours to settle.
local taken_at = holds(queue, id, eid)
local is_ours = taken_at and not is_queued_again(queue, id, taken_at)
if call('HGET', job, 'ended_by') == eid then
  local ttl, next_run, repeats_left = unpack(call('HMGET', job, 'ended_ttl', 'next_run', 'next_repeats_left'))
  call('HDEL', job, 'ended_by', 'ended_as', 'ended_ttl', 'next_run', 'next_repeats_left')
  if is_ours then settle(ttl or '', next_run or '', repeats_left or '', job .. ':dependents') end
end
let_go(queue, id, eid)
return 'done'
