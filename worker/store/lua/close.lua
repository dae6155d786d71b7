-- Let go of a job that has ended and whose dependents are queued. Of end_execution.lua's arguments it has the
-- first four.
-- A job that was cancelled, or enqueued again under the same id, meanwhile is not ours to settle any more.
-- A whole number of the job's hash; '' where a stranger has written something else over it.
local function whole(text) return text and #text < 12 and string.match(text, '^%-?%d+$') or '' end

local taken_at = holds(queue, id, eid)
local is_ours = taken_at and not is_queued_again(queue, id, taken_at)
if call('HGET', job, 'ended_by') == eid then
  local ended = call('HMGET', job, 'ended_ttl', 'next_run', 'next_repeats_left')
  call('HDEL', job, 'ended_by', 'ended_as', 'ended_ttl', 'next_run', 'next_repeats_left')
  local next_run = (ended[2] == 'front' or ended[2] == 'back') and ended[2] or whole(ended[2])
  if is_ours then settle(whole(ended[1]), next_run, whole(ended[3]), job .. ':dependents') end
end
let_go(queue, id, eid)
return 'done'
