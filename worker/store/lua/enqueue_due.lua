-- Put at most `most` jobs of one registry on their queue: jobs in 'scheduled' whose time has come, or jobs in 'ready',
-- whose dependencies are met but whose worker died before it queued them. A job that cannot be read is queued too, so
-- that a worker fails it by name. Returns how many jobs were taken from the registry.
local registry, queue = args.registry, args.queue
local from = 'rq:' .. registry .. ':' .. queue

local function take(id)
  local at_front, at_front_on_retry, ended_at, status = unpack(call(
    'HMGET', 'rq:job:' .. id, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at', 'status'
  ))
  if call('HLEN', 'rq:job:' .. id) == 0 then return end
  if registry == 'ready' and status ~= 'ready_to_enqueue' then return end
  local is_retry = (ended_at or '') ~= ''
  local goes_first = at_front == '1' or (is_retry and at_front_on_retry == '1')
  enqueue(queue, id, goes_first, args.now_iso, args.now_ts)
end

local due = call('ZRANGEBYSCORE', from, 0, args.now_ts, 'LIMIT', 0, args.most)
for _, id in ipairs(due) do
  call('ZREM', from, id)
  tried(take, id)
end
return #due
