-- Put the jobs of one queue on it that wait no longer, `most` at most: those of the registry 'scheduled' whose time has
-- come, or those of 'ready', whose dependencies are met, where whoever should have done so is gone. A job that nobody
-- can read is put there too, for a worker to fail it by name. Returns how many were taken from the registry.
local registry, queue = args.registry, args.queue
local from = 'rq:' .. registry .. ':' .. queue

local function take(id)
  local fields = call(
    'HMGET', 'rq:job:' .. id, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at', 'status'
  )
  if call('HLEN', 'rq:job:' .. id) == 0 then return end
  if registry == 'ready' and fields[4] ~= 'ready_to_enqueue' then return end
  local is_first = fields[1] == '1' or (fields[2] == '1' and (fields[3] or '') ~= '')
  enqueue(queue, id, is_first, args.now_iso, args.now_ts)
end

local due = call('ZRANGEBYSCORE', from, 0, args.now_ts, 'LIMIT', 0, args.most)
for _, id in ipairs(due) do
  call('ZREM', from, id)
  tried(take, id)
end
return #due
