-- Free the slots of one rate limit whose jobs were cancelled, deleted or set aside, and forget an empty limit.
-- ARGV: its key, now_iso, now_ts
local key, now_iso, now_ts = ARGV[1], ARGV[2], ARGV[3]
local limit = 'rq:rl:' .. key

local function needs_slot(id)
  local status = guarded(redis.call, 'HGET', 'rq:job:' .. id, 'status')
  return status == 'queued' or status == 'started'
    or (guarded(redis.call, 'ZCOUNT', 'rq:executions:' .. id, '(' .. now_ts, '+inf') or 0) > 0
end

for _, id in ipairs(redis.call('ZRANGE', limit .. ':allowed', 0, -1)) do
  if not needs_slot(id) then redis.call('ZREM', limit .. ':allowed', id) end
end
let_in(key, now_iso)
if redis.call('EXISTS', limit .. ':allowed', limit .. ':rate_limited') == 0 then
  redis.call('SREM', 'rq:rl-keys', key)
  redis.call('DEL', limit)
end
return 1
