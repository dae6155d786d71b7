-- Put at most `most` jobs of one registry on their queue: jobs in 'scheduled' whose time has come, or jobs in 'ready',
-- whose dependencies are met but whose worker died before it queued them. A job that cannot be read is queued too, so
-- that a worker fails it by name. Returns how many jobs were taken from the registry.
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
