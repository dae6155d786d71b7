-- Put the jobs of one queue on it whose time has come, as RQ's scheduler does: each at once or not at all. A job
-- that nobody can read is put there too, for a worker to fail it by name.
-- most: at most how many are taken. Returns how many were taken from rq:scheduled.
local queue, now_ts, now_iso, most = unpack(ARGV)
local scheduled, waiting = 'rq:scheduled:' .. queue, 'rq:queue:' .. queue

local function enqueue(id)
  local job = 'rq:job:' .. id
  local fields = call('HMGET', job, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at', 'ttl')
  if call('HLEN', job) == 0 then return end
  local is_first = fields[1] == '1' or (fields[2] == '1' and (fields[3] or '') ~= '')
  call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso, 'origin', queue)
  expire_in_queue(job, fields[4])
  call(is_first and 'LPUSH' or 'RPUSH', waiting, id)
end

local due = call('ZRANGEBYSCORE', scheduled, 0, now_ts, 'LIMIT', 0, most)
for _, id in ipairs(due) do
  call('ZREM', scheduled, id)
  if is_text(id) then enqueue(id) else note(scheduled, id, 'bytes that are no UTF-8') end
end
if #due > 0 then call('SADD', 'rq:queues', waiting) end
return #due
